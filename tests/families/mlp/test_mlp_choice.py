"""What a chain takes where nothing is measured, and where fast products are allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.problem import problem
from fastlinear.families.mlp.triton import backend as whole_triton
from fastlinear.native import cpp_build

ROOT = Path(__file__).parents[3]
needs_compiler = pytest.mark.skipif(cpp_build.reason_not() is not None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def unmeasured() -> Iterator[None]:
    """A tuned cache of the test's own, empty."""
    with cache.in_memory():
        yield


def chain(m: int, width: int, layers: int = 2, grad: bool = False) -> Problem:
    return problem(
        "forward",
        m,
        (width,) * (layers + 1),
        dtype="float32",
        device="cpu",
        activation="relu",
        final_activation="relu",
        precision="highest",
        needs_grad=grad,
    )


def measured(p: Problem, best: str) -> None:
    able = [b for b in family("mlp").candidates(p.piece) if b.reason_not(p) is None]
    cache.store(p, able, best, {b.name: 2.0 - (b.name == best) for b in able})


@pytest.mark.parametrize("final", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_own_ops_without_gradients(final: str, dtype: torch.dtype) -> None:
    """Activations in place: the numbers of the chain with gradients, and no argument is touched."""
    x, w = torch.randn(5, 6, dtype=dtype), torch.randn(6, 6, dtype=dtype, requires_grad=True)
    b = torch.randn(6, dtype=dtype)
    before = [t.detach().clone() for t in (x, w, b)]
    with torch.no_grad():
        y = fl.mlp(x, (w, w), (b, None), activation=final, final_activation=final, backend="eager")
        expected = reference.mlp(x, (w, w), (b, None), final, final)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert not y.requires_grad
    assert all(torch.equal(t, kept) for t, kept in zip((x, w, b), before, strict=True))
    assert y.data_ptr() not in {t.data_ptr() for t in (x, w, b)}
    other = fl.mlp(x, (w, w), (b, None), activation=final, final_activation=final, backend="eager")
    torch.testing.assert_close(other, expected, rtol=0, atol=0)
    other.sum().backward()
    assert w.grad is not None


def test_whole_triton_leaves_backwards_without_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_triton, "why_no_gpu", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def why(piece: str, layers: int, activation: str) -> str | None:
        p = problem(
            *(piece, 64, (64,) * (layers + 1)),
            dtype="bfloat16",
            device="cuda",
            activation=activation,
            needs_grad=True,
        )
        return whole_triton.reason_not(p)

    assert "without activations" in str(why("backward", 3, "none"))
    assert why("backward", 3, "relu") is None
    assert why("backward", 1, "none") is None
    assert why("forward", 3, "none") is None
