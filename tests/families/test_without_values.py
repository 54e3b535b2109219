"""Ops and layers on tensors without values: shapes on meta and fake tensors, backward too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fastlinear as fl

Op = Callable[..., Any]
X = torch.randn(4, 32)
W, D = torch.randn(64, 32), torch.randn(32, 64)
SIZES = torch.tensor([2, 1])
INDEX = torch.tensor([[0, 1], [1, 2], [0, 0], [1, 0]])
OPS: dict[str, tuple[Op, tuple[Tensor, ...]]] = {
    "linear_act": (lambda x, w: fl.linear_act(x, w, activation="gelu"), (X, W)),
    "mlp": (lambda x, w, d: fl.mlp(x, [w, d], activation="silu"), (X, W, D)),
    "gated_mlp": (fl.gated_mlp, (X, W, W, D)),
    "gated_linear": (fl.gated_linear, (X, W, W)),
    "grouped_linear": (fl.grouped_linear, (X, torch.randn(4, 16, 8))),
    "diagonal_linear": (fl.diagonal_linear, (X, W[0])),
    "unequal_linear": (lambda x, w: fl.unequal_linear([x, x], [w, w[:3]])[1], (X, W)),
    "ragged_linear": (fl.ragged_linear, (X, torch.randn(2, 64, 32), SIZES)),
    "experts": (
        fl.experts,
        (X, INDEX, torch.rand(4, 2), torch.randn(2, 8, 32), torch.randn(2, 32, 4)),
    ),
    "ragged_linear by eager": (
        lambda x, w, n: fl.ragged_linear(x, w, n, activation="gelu", backend="eager"),
        (X, torch.randn(2, 64, 32), SIZES),
    ),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: fl.nn.Linear(32, 8, activation="relu"),
    "MLP": lambda: fl.nn.MLP([32, 16, 8]),
    "GatedMLP": lambda: fl.nn.GatedMLP(32, 48),
    "DiagonalLinear": lambda: fl.nn.DiagonalLinear(32),
    "GroupedLinear": lambda: fl.nn.GroupedLinear(4, 8, 8),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_ops_give_shapes(name: str, kind: str) -> None:
    op, given = OPS[name]
    expected = op(*given)
    mode = FakeTensorMode()
    for grad in (False, True):
        made = [t.to("meta") if kind == "meta" else mode.from_tensor(t) for t in given]
        made = [t.requires_grad_(grad) if t.is_floating_point() else t for t in made]
        with mode if kind == "fake" else torch.enable_grad():
            y = op(*made)
            if grad:
                y.sum().backward()
        assert y.shape == expected.shape
        assert y.dtype is expected.dtype
        assert y.is_meta if kind == "meta" else isinstance(y, FakeTensor)
        assert y.requires_grad is grad
        if grad:
            assert all(t.grad.shape == t.shape for t in made if t.is_floating_point())
    assert torch.equal(op(*given), expected)  # later calls have values again


@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_shapes(name: str) -> None:
    layer = LAYERS[name]()
    expected = layer(X)
    on_meta = copy.deepcopy(layer).to("meta")
    y = on_meta(X.to("meta"))
    y.sum().backward()
    assert (y.is_meta, y.shape) == (True, expected.shape)
    with torch.device("meta"):
        made = LAYERS[name]()
    assert all(p.is_meta for p in made.parameters())
    made.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(made(X), expected)
