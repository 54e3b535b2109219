"""Launches of mlp's ``tasks_cuda``, the whole backward of a chain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import torch

from benchmarks.experiments.configurations import mlp_rows
from benchmarks.experiments.configurations.kind import Kind, Problem, log_uniform, width
from fastlinear.families.mlp.cuda import tasks, tasks_backend
from fastlinear.families.mlp.cuda.tasks import Step, Tiles

_MOST_ROWS, _MOST_NUMBERS, _UNITS = 1 << 16, 5e7, 132
_ACTIVATIONS = ("relu", "relu", "silu", "gelu", "tanh")


def _draw(draw: Random) -> Problem | None:
    layers = draw.choice((2, 3, 3, 4, 5, 8))
    inner = [min(width(draw), 2048) for _ in range(layers - 1)]
    if draw.random() < 0.6:
        inner = [inner[0]] * (layers - 1)
    widths = width(draw), *inner, draw.choice((1, 4, 17, inner[-1]))
    m = log_uniform(draw, _MOST_ROWS)
    if m * sum(widths) > _MOST_NUMBERS:
        return None
    return {
        **{"M": m, "K": widths[0], "widths": "-".join(map(str, widths)), "dtype": "bfloat16"},
        **{"activation": draw.choice(_ACTIVATIONS), "backward": True},
    }


def _sharing(p: Problem) -> tuple[tuple[Step, ...], bool]:
    """The steps, and whether dy is copied before, as TMA does not read it."""
    widths = list(map(int, p["widths"].split("-")))
    steps = tuple(Step(n, k, True, k) for k, n in reversed(list(pairwise(widths))))
    return steps, widths[-1] % 8 != 0


def _candidates(p: Problem) -> list[Tiles]:
    return list(tasks.CANDIDATES)


def _run(p: Problem, c: Tiles) -> Callable[..., Any]:
    def run(x: Any, weights: Any, saved: Any, dy: Any) -> Any:
        needs = True, (True,) * len(weights), (True,) * len(weights)
        given = dy, x, weights, saved, p["activation"], "none", needs
        return tasks_backend.backward(*given, config=c)

    return run


def _inputs(p: Problem, place: torch.device) -> list[tuple[Any, ...]]:
    return mlp_rows.KIND.inputs(p, place)


KIND = Kind(
    draw=_draw,
    chosen=lambda p: tasks.tiles_for(p["M"], *_sharing(p), _UNITS),
    candidates=_candidates,
    microseconds=lambda p, c: tasks.microseconds(p["M"], *_sharing(p), c, _UNITS),
    inputs=_inputs,
    run=_run,
    terms=lambda p, c: tasks.terms(p["M"], *_sharing(p), c, _UNITS),
    config=lambda p, fields: Tiles(**fields),
    group=lambda p: "all",
    plans=tasks_backend._plans,
    serves=lambda p, c: c in tasks.CANDIDATES,  # others were tried, too
)
