"""The products of rows sorted by expert: ragged_linear's backends, by its own dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import BASELINE, predictions, select
from fastlinear.families.grouped.ragged import products
from fastlinear.families.grouped.ragged.formula import Formula
from fastlinear.families.grouped.ragged.problem import STEP, problem_of
from fastlinear.families.grouped.ragged.validation import counted

Functions = tuple[Callable[..., Any], Callable[..., Any]]
"""(x, weight, sizes, bias) → y; (dy, x, weight, sizes, needs) → (dx, dW, db)."""


def functions(backend: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Functions:
    """The two directions of one product.

    Args:
        backend: of experts: ``"batch_invariant"`` takes ragged_linear's of that name; ``"cpp"`` and
            ``"triton"`` whichever it takes there, each direction its own; on a GPU one that does
            not read sizes on the host.
        x, weight, bias: of the product.
    """
    if backend == BATCH_INVARIANT:
        return _functions(backend)
    p = problem_of(x, weight, bias, "none", False)
    forward, backward = _chosen(p), _chosen(replace(p, piece=STEP, needs_grad=True))
    return _functions(forward)[0], _functions(backward)[1]


@lru_cache(maxsize=4096)
def _chosen(p: Problem) -> str:
    """On a GPU by the user's measurements, else by predictions."""
    taken = select(p).backend.name
    if p.device == "cpu" or taken != BASELINE:
        return taken
    every = [b for b in family(p.family).candidates(p.piece) if b.name != BASELINE]
    found = predictions(p, [b for b in every if b.reason_not(p) is None])
    return min(found, key=lambda name: found[name].us) if found else "triton"


cache.on_change(_chosen.cache_clear)


def _functions(name: str) -> Functions:
    if name == "eager":
        return _eager, _eager_backward
    run, back = Formula("none", name).functions()

    def forward(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = run(x, weight, sizes, bias, "none", False)[0]
        return y

    def backward(dy: Tensor, x: Tensor, weight: Tensor, sizes: Tensor, needs: Any) -> Any:
        return back(dy, None, x, weight, sizes, "none", needs)

    return forward, backward


def _eager(x: Tensor, weight: Tensor, sizes: Tensor, bias: Tensor | None) -> Tensor:
    return products.forward(x, weight, counted(sizes, x.shape[0]), bias, "none", False)[0]


def _eager_backward(dy: Tensor, x: Tensor, weight: Tensor, sizes: Tensor, needs: Any) -> Any:
    read = counted(sizes, x.shape[0])
    return products.gradients(dy, None, x, weight, read, "none", needs)
