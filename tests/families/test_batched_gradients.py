"""Batches of gradients (``is_grads_batched=True``, as Jacobians take them) through every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl

Call = Callable[..., Tensor]


def _unequal(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    first, second = fl.unequal_linear([x, y], [w, v], activation="relu")
    return first.sum(-1) + second.sum(-1)


def _ragged(x: Tensor, w: Tensor) -> Tensor:
    return fl.ragged_linear(x, w, torch.tensor([3, 2]), activation="relu")


def _experts(x: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    index = torch.tensor([[0, 1], [2, 1], [1, 1], [0, -1], [1, 0]])
    return fl.experts(x, index, weight, gate_up, down, backend="cpp")


CALLS: dict[str, tuple[Call, tuple[tuple[int, ...], ...]]] = {
    "linear_act": (lambda *t: fl.linear_act(*t, activation="gelu"), ((5, 6), (7, 6), (7,))),
    "diagonal_linear": (
        lambda *t: fl.diagonal_linear(*t, activation="silu"),
        ((2, 5, 6), (6,), (6,)),
    ),
    "diagonal_linear, plain": (lambda *t: fl.diagonal_linear(*t), ((5, 6), (6,))),
    "grouped_linear": (
        lambda *t: fl.grouped_linear(*t, activation="relu", layout="... g k"),
        ((5, 3, 6), (3, 7, 6), (3, 7)),
    ),
    "grouped_linear, channels first": (
        lambda *t: fl.grouped_linear(*t, activation="relu", layout="b (g k) ..."),
        ((2, 18, 5), (3, 7, 6), (3, 7)),
    ),
    "gated_mlp": (fl.gated_mlp, ((5, 6), (8, 6), (8, 6), (6, 8))),
    "mlp": (lambda x, *w: fl.mlp(x, list(w), None, activation="relu"), ((5, 6), (8, 6), (6, 8))),
    "mlp, C++": (
        lambda x, *w: fl.mlp(x, list(w), None, activation="gelu", backend="whole_cpp"),
        ((5, 6), (8, 6), (6, 8)),
    ),
    **{
        f"gated_mlp, {backend}": (
            lambda *t, backend=backend: fl.gated_mlp(*t, backend=backend),
            ((5, 6), (8, 6), (8, 6), (6, 8)),
        )
        for backend in ("cpp", "onednn")
    },
    "ragged_linear": (_ragged, ((5, 6), (2, 4, 6))),
    "experts": (_experts, ((5, 6), (5, 2), (2, 8, 6), (2, 6, 4))),
    "unequal_linear": (_unequal, ((5, 6), (8, 6), (5, 4), (3, 4))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_of_gradients_is_each_of_them(name: str) -> None:
    """Also once calls of the kind have run and are recorded."""
    call, shapes = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    given: Any = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    for _ in range(3):
        y = call(*given)
        batch = torch.randn(4, *y.shape, generator=generator)
        together = torch.autograd.grad(y, given, batch, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(y, given, dy, retain_graph=True) for dy in batch]
        for found, parts in zip(together, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(found, torch.stack(parts), rtol=1e-4, atol=1e-5)
