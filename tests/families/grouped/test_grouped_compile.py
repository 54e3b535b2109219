"""grouped_linear under torch.compile, torch.export and as registered ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import fastlinear as fl
from fastlinear.families.grouped import reference

LAYOUTS = {
    "... (g k)": (4, 15),
    "... g k": (2, 2, 3, 5),
    "g ... k": (3, 4, 5),
    "b (g k) ...": (2, 15, 4),
    "b g k ...": (2, 3, 5, 2, 2),
}


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def drawn(layout: str, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (LAYOUTS[layout], (3, 4, 5), (3, 4))
    x, w, b = (torch.randn(s, requires_grad=grad) for s in shapes)
    return x, w, b


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_and_backward_in_one_graph(layout: str) -> None:
    given = drawn(layout, True)
    for activation in ("none", "relu", "gelu"):

        def f(x: Tensor, w: Tensor, b: Tensor, act: str = activation) -> Tensor:
            return fl.grouped_linear(x, w, b, activation=act, layout=layout)

        run = torch.compile(f, fullgraph=True, backend="aot_eager")
        y, expected = run(*given), reference.grouped_linear(*given, activation, layout)
        close(y, expected)
        dy = torch.randn_like(y)
        close(torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy))
        with torch.no_grad():
            close(run(*given), expected)


def test_shared_input_and_module() -> None:
    layer = fl.nn.GroupedLinear(3, 5, 4, activation="silu", layout="... k")
    x = torch.randn(7, 5)
    close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_dynamic_shapes_compile_once() -> None:
    _, w, b = drawn("... (g k)", True)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(
        lambda x: fl.grouped_linear(x, w, b, activation="gelu"),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for m in (6, 9, 33):
        x = torch.randn(m, 15)
        y, expected = run(x), reference.grouped_linear(x, w, b, "gelu", "... (g k)")
        close(y, expected)
        close(torch.autograd.grad(y.sum(), w), torch.autograd.grad(expected.sum(), w))
    assert counter.frame_count == 1


def test_export() -> None:
    layer = fl.nn.GroupedLinear(3, 5, 4, activation="relu")
    program = torch.export.export(
        layer, (torch.randn(4, 15),), dynamic_shapes=({0: torch.export.Dim("m", min=2, max=64)},)
    )
    x = torch.randn(9, 15)
    close(program.module()(x), layer(x))


def test_autocast_inside() -> None:
    x, w, b = drawn("... (g k)", True)

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return fl.grouped_linear(x, w, b, activation="gelu")

    y = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, f(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_forward(layout: str, grad: bool) -> None:
    for activation in ("none", "relu", "gelu"):
        x, w, b = drawn(layout, grad)
        call = (x, w, b, activation, layout, grad, "")
        torch.library.opcheck(torch.ops.fastlinear.grouped_linear, call)


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (True, False, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_backward(layout: str, needs: tuple[bool, bool, bool]) -> None:
    x, w, _ = drawn(layout, False)
    b = torch.randn(w.shape[:2])
    for activation in ("none", "relu", "gelu"):
        y = reference.grouped_linear(x, w, None, activation, layout)
        saved = [] if activation == "none" else [y]
        call = (torch.randn_like(y), saved, x, w, b, activation, layout, list(needs), "")
        torch.library.opcheck(torch.ops.fastlinear.grouped_linear_backward, call)


@pytest.mark.parametrize("activation", ["none", "sigmoid", "quick_gelu"])
def test_registered_op_alone(activation: str) -> None:
    """Without needs_grad the pre-activation is computed again in the backward."""
    for layout in LAYOUTS:
        given = drawn(layout, True)
        expected = reference.grouped_linear(*given, activation, layout)
        theirs = torch.autograd.grad(expected.sum(), given)
        for needs_grad in (False, True):
            for backend in ("", "loop"):
                call = (*given, activation, layout, needs_grad, backend)
                y = torch.ops.fastlinear.grouped_linear(*call)[0]
                close(y, expected)
                close(torch.autograd.grad(y.sum(), given), theirs)


def test_registered_op_on_empty() -> None:
    x, w = torch.randn(0, 15, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    y = torch.ops.fastlinear.grouped_linear(x, w, None, "gelu", "... (g k)", True, "")[0]
    assert y.shape == (0, 12)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
