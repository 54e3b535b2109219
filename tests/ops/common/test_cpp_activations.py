"""Activations of the C++ backends where numbers end: NaN comes out just where torch's does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.errors import UnsupportedError
from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.common.activations import activation as activation_of

VALUES = (torch.inf, -torch.inf, torch.nan, 1e15, -1e15, 150.0, -150.0, 20.0, -20.0, 0.5, 0.0)


def grouped(b: Tensor, activation: str) -> Tensor:
    x, w = torch.zeros(1, 2 * 5), torch.zeros(2, b.numel(), 5)
    biases = torch.stack([b, torch.zeros_like(b)])
    return fl.grouped_linear(x, w, biases, activation, backend="cpp")[0, : b.numel()]


def diagonal(b: Tensor, activation: str) -> Tensor:
    x, w = torch.zeros(1, b.numel()), torch.zeros(b.numel())
    return fl.diagonal_linear(x, w, b, activation=activation, backend="cpp")[0]


def chain(b: Tensor, activation: str) -> Tensor:
    x, ws = torch.zeros(1, 5), [torch.zeros(6, 5), torch.zeros(b.numel(), 6)]
    biases = [torch.zeros(6), b]
    return fl.mlp(x, ws, biases, "relu", final_activation=activation, backend="whole_cpp")[0]


@pytest.mark.parametrize("call", [grouped, diagonal, chain], ids=lambda c: c.__name__)
@pytest.mark.parametrize("activation", NAMES)
def test_ends_of_the_numbers(activation: str, call: Callable[[Tensor, str], Tensor]) -> None:
    values = VALUES[1:] if activation == "gelu" else VALUES  # torch's gelu of infinity is NaN
    found, wanted = torch.tensor(values).requires_grad_(), torch.tensor(values).requires_grad_()
    try:
        y = call(found, activation)
    except UnsupportedError as error:
        pytest.skip(str(error))
    z = activation_of(activation).value(wanted)
    (dy,) = torch.autograd.grad(y.sum(), found)
    (dz,) = torch.autograd.grad(z.sum(), wanted)
    for ours, torchs in ((y, z), (dy, dz)):
        assert torch.equal(ours.isnan(), torchs.isnan()), (activation, ours, torchs)
        torch.testing.assert_close(ours, torchs, equal_nan=True)
