"""The family record of unequal_linear: its backends and least cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.core.compare import KINKED
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import always, register_family
from fastlinear.dispatch.drawn import Draw, linear_clear_of_kinks
from fastlinear.families.grouped import one_step
from fastlinear.families.grouped.unequal.cpu import cpp
from fastlinear.families.grouped.unequal.problem import NAME, SPACE, problem
from fastlinear.families.linear import backends as linear_act
from fastlinear.families.linear import batch_invariant
from fastlinear.kernels import CPP_SOURCES, CUDA_SOURCES

__all__ = ["FAMILY", "NAME", "problem"]

_SOURCES = (
    *("families/grouped/unequal/autograd.py", "families/grouped/unequal/layout.py"),
    *("families/grouped/unequal/cuda", "families/grouped/unequal/cpu", "families/grouped/cpu"),
    *(*CUDA_SOURCES, *CPP_SOURCES),
)


def _reason_not_together(p: Problem) -> str | None:
    if p.device != "cuda":
        return cpp.reason_not(p)
    from fastlinear.families.grouped.unequal.cuda import backend

    return backend.reason_not(p)


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece, groups of half to one and a half the mean sizes."""
    groups, act = p.dim("G"), p.option("activation")
    draw = Draw(p, device, seed)
    unit = 8 if p.option("rows") == "aligned" else 1

    def sizes(mean: int, unit: int, turn: int) -> list[int]:
        half = mean // 2 if groups > 1 else 0
        spread = [mean + half * ((g + turn) % 3 - 1) for g in range(groups)]
        return [max(unit, size // unit * unit) for size in spread]

    ks, ns = sizes(p.dim("K"), unit, 0), sizes(p.dim("N"), unit, 1)
    ms = sizes(max(1, p.dim("M") // groups), 1, 2)
    weights = tuple(draw(n, k, scale=k**-0.5) for k, n in zip(ks, ns, strict=True))
    biases: Any = None
    if p.option("bias") != "no":
        some = p.option("bias") == "some"
        biases = tuple(None if some and g % 2 else draw(n) for g, n in enumerate(ns))
    xs = tuple(draw(m, k) for m, k in zip(ms, ks, strict=True))
    if p.piece == "forward":
        return xs, weights, biases, act
    if act in KINKED:
        held = biases or (None,) * groups
        each = zip(xs, weights, held, strict=True)
        xs = tuple(linear_clear_of_kinks(*group, draw) for group in each)
    return xs, weights, biases, act, tuple(draw(m, n) for m, n in zip(ms, ns, strict=True))


FAMILY = register_family(
    one_step.family(
        NAME,
        "fastlinear.families.grouped.unequal",
        backends=(
            ("eager", always, ()),
            ("together", _reason_not_together, _SOURCES),
            (BATCH_INVARIANT, batch_invariant.reason_not, linear_act.PIECES_SOURCES),
        ),
        space=SPACE,
        make_inputs=_make_inputs,
    )
)
