"""linear_act under torch.compile, torch.export and as registered ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.families.linear import reference
from fastlinear.op import library


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(f: Any, **options: Any) -> Any:
    """Through Dynamo and AOTAutograd, without Inductor's C++ compiler."""
    return torch.compile(f, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "quick_gelu"])
def test_forward_and_backward_in_one_graph(activation: str) -> None:
    layer = fl.nn.Linear(8, 5, activation=activation)
    x = torch.randn(2, 3, 8, requires_grad=True)
    run = compiled(layer)
    y = run(x)
    expected = reference.linear_act(x, layer.weight, layer.bias, activation)
    close(y, expected)
    wanted = (x, layer.weight, layer.bias)
    dy = torch.randn_like(y)
    close(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy))
    with torch.no_grad():
        close(run(x), expected)


def test_dynamic_shapes_compile_once() -> None:
    w, b = torch.randn(5, 8, requires_grad=True), torch.randn(5)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(
        lambda x: fl.linear_act(x, w, b, activation="gelu"),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for m in (4, 7, 33, 64):
        x = torch.randn(m, 8)
        y, expected = run(x), F.gelu(F.linear(x, w, b))
        close(y, expected)
        close(torch.autograd.grad(y.sum(), w), torch.autograd.grad(expected.sum(), w))
    assert counter.frame_count == 1


def test_inductor() -> None:
    layer = fl.nn.Linear(8, 5, activation="silu")
    x = torch.randn(4, 8)
    run = torch.compile(layer, fullgraph=True)
    y = run(x)
    close(y, F.silu(F.linear(x, layer.weight, layer.bias)))
    close(
        torch.autograd.grad(y.sum(), layer.weight),
        torch.autograd.grad(F.silu(F.linear(x, layer.weight, layer.bias)).sum(), layer.weight),
    )


def test_graphs_of_another_version_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    w = torch.randn(5, 8, requires_grad=True)
    x = torch.randn(4, 8)
    found = []
    for revision in ("a", "a", "b"):
        monkeypatch.setattr(library, "REVISION", revision)
        torch._dynamo.reset()
        seen = torch._dynamo.utils.counters["aot_autograd"]
        before = seen["autograd_cache_hit"]
        y = torch.compile(lambda x, w: fl.linear_act(x, w, activation="silu"))(x, w)
        torch.autograd.grad(y.sum(), w)  # a graph is stored with its backward
        found.append(seen["autograd_cache_hit"] - before)
    assert found == [0, 1, 0]


def test_autocast_inside() -> None:
    layer, x = fl.nn.Linear(8, 5, activation="gelu"), torch.randn(4, 8)

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    y = compiled(f)(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, f(x), rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


def test_transforms_inside() -> None:
    x, w, b = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)

    def f(row: Tensor) -> Tensor:
        return fl.linear_act(row, w, b, activation="relu")

    close(compiled(lambda x: torch.vmap(f)(x))(x), F.relu(F.linear(x, w, b)))
    close(
        compiled(lambda x: torch.func.grad(lambda r: f(r).sum())(x))(x),
        torch.func.grad(lambda r: f(r).sum())(x),
    )


def test_bad_input_is_reported_while_tracing() -> None:
    run = compiled(lambda x, w: fl.linear_act(x, w))
    with pytest.raises(Exception, match=r"InputError|expected x of shape|last dimension"):
        run(torch.randn(4, 7), torch.randn(5, 8))


def test_export() -> None:
    layer = fl.nn.Linear(8, 5, activation="gelu")
    x = torch.randn(4, 8)
    program = torch.export.export(
        layer, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2, max=512)},)
    )
    for rows in (4, 9):
        x = torch.randn(rows, 8)
        close(program.module()(x), layer(x))


def samples(activation: str, grad: bool) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    made = []
    for shape, bias, transposed in (
        ((3, 8), True, False),
        ((2, 3, 8), False, True),
        ((8,), True, False),
    ):
        w = torch.randn(8, 5).t() if transposed else torch.randn(5, 8)
        b = torch.randn(5, requires_grad=grad) if bias else None
        made.append((torch.randn(shape, requires_grad=grad), w.requires_grad_(grad), b))
    return made


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_opcheck_forward(activation: str, grad: bool) -> None:
    for x, w, b in samples(activation, grad):
        torch.library.opcheck(
            torch.ops.fastlinear.linear_act, (x, w, b, activation, grad, ""), raise_exception=True
        )


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (True, False, True)])
def test_opcheck_backward(activation: str, needs: tuple[bool, bool, bool]) -> None:
    x, w, dy = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    y, pre = reference.forward(x, w, None, activation, True)
    saved = {"none": [], "relu": [y], "gelu": [pre]}[activation]
    call = (dy, saved, x, w, torch.randn(5), activation, list(needs), "")
    torch.library.opcheck(torch.ops.fastlinear.linear_act_backward, call)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_registered_op_alone(activation: str) -> None:
    """Without needs_grad the pre-activation is computed again in the backward."""
    for x, w, b in samples(activation, True):
        expected = reference.linear_act(x, w, b, activation)
        wanted = [t for t in (x, w, b) if t is not None]
        for needs_grad in (False, True):
            y = torch.ops.fastlinear.linear_act(x, w, b, activation, needs_grad, "")[0]
            close(y, expected)
            close(
                torch.autograd.grad(y.sum(), wanted),
                torch.autograd.grad(expected.sum(), wanted, retain_graph=True),
            )


@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_registered_op_on_empty(m: int, k: int, n: int, needs_grad: bool) -> None:
    x, w = torch.randn(m, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    y = torch.ops.fastlinear.linear_act(x, w, None, "gelu", needs_grad, "")[0]
    assert y.shape == (m, n)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
