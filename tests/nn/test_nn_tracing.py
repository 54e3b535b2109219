"""What torch.fx records of the layers: one call of their op each, on their own parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl


class Routed(nn.Module):
    """Experts with the choices of three tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.experts = fl.nn.Experts(3, 4, 2, **options)
        self.register_buffer("index", torch.tensor([[0, 2], [1, 1], [2, 0]]))
        self.register_buffer("weight", torch.rand(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, self.index, self.weight)
        return y


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Linear": (lambda: fl.nn.Linear(4, 4, activation="relu"), "linear_act"),
    "MLP": (lambda: fl.nn.MLP([4, 6, 4]), "mlp"),
    "GroupedLinear": (lambda: fl.nn.GroupedLinear(2, 2, 2), "grouped_linear"),
    "DiagonalLinear": (lambda: fl.nn.DiagonalLinear(4), "diagonal_linear"),
    "GatedMLP": (lambda: fl.nn.GatedMLP(4, 6), "gated_mlp"),
    "GatedMLP bias": (lambda: fl.nn.GatedMLP(4, 6, bias=True, activation="relu2"), "gated_mlp"),
    "GatedMLP stacked": (lambda: fl.nn.GatedMLP(4, 6, stacked="interleaved"), "gated_mlp"),
    "GatedMLP recompute": (lambda: fl.nn.GatedMLP(4, 6, recompute=1), "gated_mlp"),
    "Experts": (Routed, "experts"),
    "Experts transposed": (lambda: Routed(transposed=True, bias=True, limit=7.0), "experts"),
    "GatedMLP dropout": (lambda: fl.nn.GatedMLP(4, 6, dropout=0.5), "gated_linear"),
}


def test_every_layer_is_here() -> None:
    assert {name.split()[0] for name in LAYERS} == set(fl.nn.__all__)


class Parent(nn.Module):
    """A model with the layer in it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + 1
        return y


@pytest.mark.parametrize("name", LAYERS)
def test_a_trace_computes_the_same(name: str) -> None:
    make, op = LAYERS[name]
    for model in (make(), Parent(make())):
        traced = torch.fx.symbolic_trace(model)
        assert getattr(fl, op) in {node.target for node in traced.graph.nodes}
        assert dict(traced.named_parameters()).keys() == dict(model.named_parameters()).keys()
        x = torch.randn(3, 4, requires_grad=True)
        found = []
        for run in (model, traced):
            torch.manual_seed(0)
            y = run(x)
            found.append((y, *torch.autograd.grad(y.sum(), [x, *model.parameters()])))
        torch.testing.assert_close(*found)


def test_a_wider_down_projection_is_traced() -> None:
    layer = fl.nn.GatedMLP(4, 6, dtype=torch.bfloat16)
    layer.down_proj.float()
    x = torch.randn(3, 4).bfloat16()
    traced = torch.fx.symbolic_trace(layer)
    assert traced(x).dtype is torch.float32
    torch.testing.assert_close(traced(x), layer(x))


def test_tracing_goes_by_what_stands_in_a_layers_place() -> None:
    layer = fl.nn.GatedMLP(4, 6)
    layer.up_proj = nn.Sequential(copy.deepcopy(layer.up_proj), nn.Tanh())
    x = torch.randn(3, 4)
    traced = torch.fx.symbolic_trace(layer)
    torch.testing.assert_close(traced(x), layer(x))


class Doubled(fl.nn.Linear):
    """A layer with a forward of its own, which TorchScript can read."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore")
def test_torchscript_refuses_by_name_and_traces(name: str) -> None:
    make, _ = LAYERS[name]
    for model in (make().eval(), Parent(make()).eval()):
        with pytest.raises(
            fl.UnsupportedError, match=rf"received fastlinear\.nn\.{name.split()[0]}"
        ):
            torch.jit.script(model)
        x = torch.randn(3, 4)
        traced = torch.jit.trace(model, (torch.randn(3, 4),))
        torch.testing.assert_close(traced(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_subclass_with_another_forward_is_scripted() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(torch.jit.script(Doubled(4, 4))(x), 2 * x)
