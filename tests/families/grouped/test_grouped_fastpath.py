"""Calls of grouped_linear through the compiled lookup, and training calls by its nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastlinear as fl
from fastlinear.core.compare import judge
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.cpu import cpp
from fastlinear.families.grouped.problem import problem
from fastlinear.families.grouped.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.op.front import no_table

G, K, N = 3, 20, 12
_P = problem("forward", 64, G, K, N, dtype="float32", device="cpu")
SHAPES = {
    "... (g k)": (2, 40, G * K),
    "... g k": (70, G, K),
    "g ... k": (G, 2, 35, K),
    "b (g k) ...": (2, G * K, 5, 7),
    "b g k ...": (4, G, K, 9),
}


@pytest.fixture(autouse=True)
def _there() -> None:
    if not (lookup.wait(120) and autograd_node.wait(120)):
        pytest.skip("no compiler here")


def draw(layout: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight and bias, which want gradients."""
    made = (torch.randn(SHAPES[layout]), torch.randn(G, N, K) / K**0.5, torch.randn(G, N))
    return [t.to(dtype).requires_grad_() for t in made]


def everything(run: Any, given: list[Tensor]) -> tuple[Tensor, ...]:
    """y, then the gradients of its sum of squares."""
    y = run(*given)
    return (y.detach(), *torch.autograd.grad(y.square().sum(), given))


def test_a_fast_path_that_comes_later_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a kind that was seen before the fast path was there go through it afterwards."""
    given = [t.detach() for t in draw("... g k")]
    monkeypatch.setattr(FRONT, "table", no_table)
    FRONT.plans.clear()
    monkeypatch.setattr(lookup, "table", lambda _: None)
    first = fl.grouped_linear(*given, layout="... g k")
    assert FRONT.table is no_table
    monkeypatch.undo()
    assert torch.equal(fl.grouped_linear(*given, layout="... g k"), first)
    assert FRONT.table is not no_table


@pytest.mark.skipif(cpp.reason_not(_P) is not None, reason=str(cpp.reason_not(_P)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("layout", SHAPES)
def test_tapes_take_no_python(
    layout: str, activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a kind of call is known, neither direction comes back to Python; results are right."""
    given = draw(layout, dtype)
    if cpp.reason_not(problem("forward", 4, G, K, N, dtype=str(dtype)[6:], device="cpu")):
        pytest.skip("no such products here")

    def run(*t: Tensor) -> Tensor:
        return fl.grouped_linear(*t, activation=activation, layout=layout, backend="cpp")

    for _ in range(2):
        everything(run, given)
        with torch.no_grad():
            run(*given)

    def failing(*_: Any) -> Any:
        raise AssertionError("in Python")

    for name in ("forward", "backward"):
        monkeypatch.setattr(cpp, name, failing)
    monkeypatch.setattr(FRONT, "looked_up", failing)
    fresh = draw(layout, dtype)
    ours = everything(run, fresh)
    with torch.no_grad():
        assert torch.equal(run(*fresh), ours[0])

    def torchs(*t: Tensor) -> Tensor:
        return reference.grouped_linear(*t, activation, layout)

    theirs = everything(torchs, fresh)
    oracle = everything(torchs, [t.detach().double().requires_grad_() for t in fresh])
    for name, a, t, o in zip(("y", "dx", "dW", "db"), ours, theirs, oracle, strict=True):
        verdict = judge(name, a, t, o)
        assert verdict.passed, str(verdict)
        assert a.shape == t.shape
        assert a.is_contiguous()


def test_training_calls_are_recorded_in_cpp() -> None:
    for backend in ("cpp", "loop"):
        given = draw("... g k")
        if backend == "cpp" and cpp.reason_not(_P) is not None:
            continue
        for _ in range(3):
            y = fl.grouped_linear(*given, layout="... g k", backend=backend)
        assert type(y.grad_fn).__name__ == "CppFunction"
        assert y.grad_fn is not None
        assert y.grad_fn.name() == "GroupedLinearBackward"


def test_what_tapes_cannot_serve() -> None:
    """Expanded gradients, those of gradients, checkpoints, other strides, y changed in place."""

    def run(*t: Tensor) -> Tensor:
        return fl.grouped_linear(*t, activation="silu", layout="... g k")

    def torchs(*t: Tensor) -> Tensor:
        return reference.grouped_linear(*t, "silu", "... g k")

    given = draw("... g k")
    for _ in range(2):
        everything(run, given)
    for f in (
        lambda g, t: torch.autograd.grad(g(*t).sum(), t),
        lambda g, t: torch.autograd.grad(checkpoint(g, *t, use_reentrant=False).exp().sum(), t),
        lambda g, t: torch.autograd.grad(g(*t).add_(1).square().sum(), t),
        lambda g, t: torch.autograd.grad(
            torch.autograd.grad(g(*t).square().sum(), t[0], create_graph=True)[0].square().sum(), t
        ),
    ):
        torch.testing.assert_close(f(run, given), f(torchs, given), rtol=2e-4, atol=2e-4)
    x = torch.randn(70, G, 2 * K)[..., ::2].requires_grad_()
    for _ in range(3):
        found = everything(run, [x, *given[1:]])
    torch.testing.assert_close(found, everything(torchs, [x, *given[1:]]), rtol=2e-4, atol=2e-4)


def test_a_view_is_asked_for() -> None:
    """Tokens without a common stride: copied first, never read where they do not lie."""
    x = torch.randn(3, 4, 5, G, K).permute(2, 0, 1, 3, 4)
    w = torch.randn(G, N, K)
    for _ in range(3):
        y = fl.grouped_linear(x, w, layout="... g k")
    torch.testing.assert_close(y, reference.grouped_linear(x, w, None, "none", "... g k"))
