"""Launches of mlp's ``rows_cuda`` that carry rows through a chain, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import torch

from benchmarks.experiments.configurations.kind import (
    Kind,
    Problem,
    dtype_of,
    log_uniform,
    normal,
    turns,
    width,
)
from fastlinear.families.mlp.cuda import rows, rows_backend
from fastlinear.families.mlp.cuda.rows import Rows, Widths

_MOST_ROWS = 1 << 18
_ACTIVATIONS = ("relu", "relu", "silu", "gelu", "tanh")
_UNITS = 132


def _draw(draw: Random) -> Problem | None:
    layers = draw.choice((2, 3, 3, 4, 5, 8))
    inner = [min(width(draw), rows.MAX_WIDTH) for _ in range(layers - 1)]
    if draw.random() < 0.6:
        inner = [inner[0]] * (layers - 1)
    ends = [min(width(draw), rows.MAX_WIDTH), draw.choice((1, 4, 17, inner[-1]))]
    backward = draw.random() < 0.5
    problem = {
        "M": log_uniform(draw, _MOST_ROWS),
        "K": ends[0],
        "widths": "-".join(map(str, (ends[0], *inner, ends[1]))),
        "dtype": "bfloat16",
        "activation": draw.choice(_ACTIVATIONS),
        "backward": backward,
    }
    return problem if _candidates(problem) else None


def _steps(p: Problem) -> Widths:
    """Widths of the launch's steps."""
    widths = tuple(map(int, p["widths"].split("-")))
    return widths[::-1] if p["backward"] else widths


def _chosen(p: Problem) -> Rows:
    found = rows.rows_for(p["M"], _steps(p), p["backward"], False, _UNITS)
    assert found is not None
    return found


def _candidates(p: Problem) -> list[Rows]:
    """What calls choose from, with fewer slots, too."""
    steps, found = _steps(p), []
    for config in rows.candidates(steps, p["backward"], False):
        fewer = replace(config, stages=max(2, config.stages // 2))
        found += [config, fewer]
    return [c for c in dict.fromkeys(found) if c.invalid(steps, p["backward"], False) is None]


def _inputs(p: Problem, place: torch.device) -> list[tuple[Any, ...]]:
    m, widths, dtype = p["M"], list(map(int, p["widths"].split("-"))), dtype_of(p)
    numbers = m * sum(widths) + sum(k * n for k, n in pairwise(widths))

    def made() -> tuple[Any, ...]:
        weights = tuple(normal(place, dtype, n, k) / k**0.5 for k, n in pairwise(widths))
        saved = tuple(normal(place, dtype, m, n) for n in widths[1:]) if p["backward"] else ()
        dy = normal(place, dtype, m, widths[-1])
        return normal(place, dtype, m, widths[0]), weights, saved, dy

    return [made() for _ in range(turns(numbers, dtype))]


def _run(p: Problem, c: Rows) -> Callable[..., Any]:
    names = p["activation"], "none"

    def run(x: Any, weights: Any, saved: Any, dy: Any) -> Any:
        layers = len(weights)
        if p["backward"]:
            needs = True, (False,) * layers, (False,) * layers
            return rows_backend.backward(dy, x, weights, saved, *names, needs, config=c)
        return rows_backend.forward(x, weights, (None,) * layers, *names, False, config=c)

    return run


def _terms(p: Problem, c: Rows) -> tuple[float, ...]:
    return c.terms(p["M"], _steps(p), _UNITS)


KIND = Kind(
    draw=_draw,
    chosen=_chosen,
    candidates=_candidates,
    microseconds=lambda p, c: c.microseconds(p["M"], _steps(p), p["backward"], _UNITS),
    inputs=_inputs,
    run=_run,
    terms=_terms,
    config=lambda p, fields: Rows(**fields),
    group=lambda p: "backward" if p["backward"] else "forward",
)
