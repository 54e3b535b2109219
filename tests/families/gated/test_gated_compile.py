"""gated_mlp and gated_linear under torch.compile, torch.export and as registered ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import fastlinear as fl
from fastlinear.families.gated import reference
from fastlinear.families.gated.stacking import ORDERS, Biases, Weights

K, H, N = 5, 6, 4


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def drawn(order: str, grad: bool, down: bool = True, bias: bool = True) -> list[Tensor | None]:
    """x, gate, up and down weight, their biases."""
    rows = H if order == "apart" else 2 * H
    up = order == "apart"
    shapes: list[tuple[int, ...] | None] = [(2, 3, K), (rows, K), (H, K) if up else None]
    shapes += [(N, H) if down else None]
    shapes += [(rows,), (H,) if up else None, (N,) if down else None] if bias else [None] * 3
    return [None if s is None else torch.randn(s, requires_grad=grad) for s in shapes]


def expected_of(given: list[Any], activation: str, order: str) -> Tensor:
    return reference.gated_mlp(
        given[0], Weights(*given[1:4]), Biases(*given[4:7]), activation, order
    )


def present(given: list[Any]) -> list[Tensor]:
    return [t for t in given if t is not None]


@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_forward_and_backward_in_one_graph(order: str, down: bool) -> None:
    for level in (None, 0, 1):
        given = drawn(order, True, down)

        def f(x: Any, *p: Any, level: int | None = level) -> Tensor:
            options: Any = {
                "activation": "gelu",
                "stacked": None if order == "apart" else order,
                "recompute": level,
            }
            if down:
                return fl.gated_mlp(x, *p, **options)
            return fl.gated_linear(x, p[0], p[1], p[3], p[4], **options)

        run = torch.compile(f, fullgraph=True, backend="aot_eager")
        y, expected = run(*given), expected_of(given, "gelu", order)
        close(y, expected)
        dy = torch.randn_like(y)
        close(
            torch.autograd.grad(y, present(given), dy),
            torch.autograd.grad(expected, present(given), dy),
        )
        with torch.no_grad():
            close(run(*given), expected)


@pytest.mark.parametrize("level", [None, 0, 1])
def test_nothing_is_kept_for_the_down_bias_alone(level: int | None) -> None:
    given = drawn("apart", False)
    bias = given[6]
    assert bias is not None
    bias.requires_grad_()
    kept: list[Tensor] = []

    def f(*given: Any) -> Tensor:
        return fl.gated_mlp(*given, recompute=level)

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    run = torch.compile(f, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(*given)
    close(y, expected_of(given, "silu", "apart"))
    assert not kept
    dy = torch.randn_like(y)
    close(torch.autograd.grad(y, bias, dy)[0], dy.sum((0, 1)))


def test_dynamic_shapes_compile_once() -> None:
    given = drawn("apart", True)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(
        lambda x: fl.gated_mlp(x, *given[1:], activation="silu"),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for m in (7, 9, 33):
        x = torch.randn(m, K)
        y, expected = run(x), expected_of([x, *given[1:]], "silu", "apart")
        close(y, expected)
        close(torch.autograd.grad(y.sum(), given[1]), torch.autograd.grad(expected.sum(), given[1]))
    assert counter.frame_count == 1


def test_export() -> None:
    layer = fl.nn.GatedMLP(K, H, N, bias=True, stacked="gate_up")
    program = torch.export.export(
        layer, (torch.randn(4, K),), dynamic_shapes=({0: torch.export.Dim("m", min=2, max=64)},)
    )
    x = torch.randn(9, K)
    close(program.module()(x), layer(x))


def test_autocast_inside() -> None:
    given = drawn("apart", True)

    def f(x: Any, *p: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return fl.gated_mlp(x, *p, activation="gelu")

    y = torch.compile(f, fullgraph=True, backend="aot_eager")(*given)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, f(*given), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_opcheck_forward(order: str, grad: bool) -> None:
    for down in (True, False):
        for recompute in (False, True):
            given = drawn(order, grad, down)
            call = (*given, "gelu", order, recompute, grad, "")
            torch.library.opcheck(torch.ops.fastlinear.gated_mlp, call)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_opcheck_backward(order: str, keep: bool) -> None:
    for down in (True, False):
        x, *rest = drawn(order, False, down)
        assert x is not None
        rows = x.flatten(0, 1)
        pre = reference.pre_activations(rows, Weights(*rest[:3]), Biases(*rest[3:]))  # type: ignore[arg-type]
        dy = torch.randn(2, 3, N if down else H)
        held = [t is not None for t in (x, *rest)]
        for needs in (held, [True, *[False] * 6], [False, *held[1:]]):
            saved = [t for t in pre if keep and t is not None]
            call = (dy, saved, x, *rest, "relu", order, not keep, needs, "")
            torch.library.opcheck(torch.ops.fastlinear.gated_mlp_backward, call)


@pytest.mark.parametrize("order", ORDERS)
def test_registered_op_alone(order: str) -> None:
    """Without needs_grad the pre-activations are formed again in the backward."""
    given = drawn(order, True)
    expected = expected_of(given, "quick_gelu", order)
    theirs = torch.autograd.grad(expected.sum(), present(given))
    for needs_grad in (False, True):
        for backend in ("", "eager"):
            call = (*given, "quick_gelu", order, False, needs_grad, backend)
            y = torch.ops.fastlinear.gated_mlp(*call)[0]
            close(y, expected)
            close(torch.autograd.grad(y.sum(), present(given)), theirs)


def test_registered_op_on_empty() -> None:
    given = drawn("apart", True)
    x = torch.randn(0, K, requires_grad=True)
    y = torch.ops.fastlinear.gated_mlp(x, *given[1:], "gelu", "apart", False, True, "")[0]
    assert y.shape == (0, N)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_the_bias_alone_of_no_features() -> None:
    db = torch.randn(0, requires_grad=True)
    x, g, u, d = (torch.randn(s) for s in ((3, K), (H, K), (H, K), (0, H)))
    run = torch.compile(fl.gated_mlp, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(run(x, g, u, d, None, None, db).sum(), db)
    assert found.shape == (0,)
