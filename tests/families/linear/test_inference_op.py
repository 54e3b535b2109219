"""linear_act without gradients inside a compiled graph: the op it calls, and the weight it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.families.linear import reference
from fastlinear.families.linear.spec import FRONT
from fastlinear.fastpath import lookup

OP = torch.ops.fastlinear.linear_act_inference.default


def given(turned: bool, bias: bool, grad: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    w = torch.randn(8, 5) if turned else torch.randn(5, 8)
    b = torch.randn(5, requires_grad=grad) if bias else None
    return torch.randn(2, 3, 8, requires_grad=grad), w.requires_grad_(grad), b


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(turned: bool, bias: bool, grad: bool) -> None:
    x, w, b = given(turned, bias, grad)
    torch.library.opcheck(OP, (x, w, b, turned, "gelu", ""), raise_exception=True)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_it_records_gradients_where_it_is_run_with_them(turned: bool, activation: str) -> None:
    x, w, b = given(turned, True, True)
    assert b is not None
    y = OP(x, w, b, turned, activation, "")
    expected = reference.linear_act(x, w.t() if turned else w, b, activation)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, (x, w, b), dy), torch.autograd.grad(expected, (x, w, b), dy)
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_exported_graph_keeps_its_gradients(activation: str, compiled: bool) -> None:
    """Also where it is traced once more, and only what follows it would seem to need any."""
    layer: nn.Module = nn.Sequential(fl.nn.Linear(8, 5, activation=activation), nn.LayerNorm(5))
    x = torch.randn(4, 8)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), strict=True)
    assert "linear_act_inference" in program.graph_module.code
    module = program.module()
    torch._dynamo.reset()
    run: Any = torch.compile(module, backend="aot_eager") if compiled else module
    parameters = list(module.parameters())  # the layers' own
    found = torch.autograd.grad(run(x).pow(3).sum(), parameters)
    expected = torch.autograd.grad(layer(x).pow(3).sum(), parameters)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("turned", [False, True])
def test_a_compiled_graph_hands_on_the_parameter_itself(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(torch.randn(16, 24) if turned else torch.randn(24, 16))
    seen: list[Any] = []
    real = FRONT.run

    def spy(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.append(weight if weight._base is None else weight._base)
        return real(x, weight, *rest)

    monkeypatch.setattr(FRONT, "run", spy)

    @torch.compile(fullgraph=True)
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return fl.linear_act(x + 1, weight.t() if turned else weight, activation="relu") * 2

    torch._dynamo.reset()
    x = torch.randn(4, 16)
    with torch.no_grad():
        for _ in range(3):
            y = run(x, weight)
        expected = torch.relu((x + 1) @ (weight if turned else weight.t())) * 2
    torch.testing.assert_close(y, expected)
    assert len(seen) == 3
    assert all(w is weight for w in seen[1:])  # torch watches the first call in a mode of its own


def test_repeated_calls_find_their_plan_in_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    if not lookup.wait(60):
        pytest.skip(str(lookup.reason_not()))
    looked_up: list[str] = []
    real = FRONT.looked_up

    def counted(*args: Any) -> Tensor:
        looked_up.append(args[3])
        return real(*args)

    monkeypatch.setattr(FRONT, "looked_up", counted)
    x, w, b = given(False, True, False)
    with torch.no_grad():
        for _ in range(4):
            OP(x, w, b, False, "gelu", "eager")
    assert len(looked_up) <= 2


def test_a_compiler_may_run_the_op_itself() -> None:
    """Some backends run a graph on its example inputs, while ``is_compiling()`` is true."""
    layer, x = fl.nn.Linear(8, 5, activation="relu"), torch.randn(4, 8)
    seen: list[Tensor] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph(*inputs)[0])
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        y = torch.compile(layer, backend=backend)(x)
    torch.testing.assert_close(seen[0], y)
