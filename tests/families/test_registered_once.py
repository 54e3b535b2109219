"""Registered ops are differentiated once: a gradient of their gradients is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear_act": (lambda: fl.nn.Linear(8, 5, activation="gelu"), (3, 8)),
    "relu2": (lambda: fl.nn.Linear(8, 5, activation="relu2"), (3, 8)),
    "no bias": (lambda: fl.nn.Linear(8, 5, bias=False), (3, 8)),
    "mlp": (lambda: fl.nn.MLP([8, 8, 5], activation="gelu"), (3, 8)),
    "gated_mlp": (lambda: fl.nn.GatedMLP(8, 16, activation="silu"), (3, 8)),
    "grouped_linear": (lambda: fl.nn.GroupedLinear(2, 4, 5, activation="gelu"), (3, 8)),
    "diagonal_linear": (lambda: fl.nn.DiagonalLinear(8, activation="gelu"), (3, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_gradient_of_gradients_is_an_error(name: str) -> None:
    """Dynamo's graph run as it is: autograd records the registered op itself."""
    make, shape = LAYERS[name]
    layer = make()
    torch._dynamo.reset()
    run = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(shape, requires_grad=True)
    wanted: list[Tensor] = [x, *layer.parameters()]
    plain = torch.autograd.grad(layer(x).square().sum(), wanted)
    once = torch.autograd.grad(run(x).square().sum(), wanted)
    grads = torch.autograd.grad(run(x).square().sum(), wanted, create_graph=True)
    for expected, first, ours in zip(plain, once, grads, strict=True):
        assert torch.equal(first, ours)
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)
    penalty = grads[0].square().sum()
    for leaf in wanted[:2]:
        with pytest.raises(fl.UnsupportedError, match="differentiated once"):
            torch.autograd.grad(penalty, leaf, retain_graph=True)
    with pytest.raises(fl.UnsupportedError, match=r"create_graph=True.*outside the compiled"):
        (penalty + run(x).sum()).backward()


def test_a_constant_gradient_is_no_way_around_it() -> None:
    layer = fl.nn.Linear(8, 5, activation="relu2")
    torch._dynamo.reset()
    x = torch.randn(3, 8, requires_grad=True)
    y = torch.compile(layer, backend="eager", fullgraph=True)(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(fl.UnsupportedError, match="differentiated once"):
        torch.autograd.grad(dx.sum(), layer.weight)
