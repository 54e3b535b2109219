"""Triton's kernels of diagonal_linear: its forward, and the sweep of its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch

from benchmarks.experiments.configurations.kind import (
    Kind,
    Problem,
    dtype_of,
    log_uniform,
    name_of,
    normal,
    turns,
    width,
)
from fastlinear.families.diagonal.triton import backend, choices
from fastlinear.families.diagonal.triton.config import DiagonalConfig, config_for, one_launch

_MOST_ROWS, _MOST_NUMBERS = 1 << 17, 1 << 26
_ACTIVATIONS = ("none", "relu", "silu", "gelu")


def _draw(draw: Random) -> Problem | None:
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    m, k = log_uniform(draw, _MOST_ROWS), width(draw)
    if m * k > _MOST_NUMBERS:
        return None
    piece, activation = draw.choice(("forward", "backward")), draw.choice(_ACTIVATIONS)
    return {"piece": piece, "M": m, "K": k, "dtype": name_of(dtype), "activation": activation}


def _call(p: Problem) -> tuple[str, int, int, int, str]:
    return p["piece"], p["M"], p["K"], dtype_of(p).itemsize, p["activation"]


def _chosen(p: Problem) -> DiagonalConfig:
    found = config_for(*_call(p))
    made = one_launch(p["M"], p["K"], found) if p["piece"] == "backward" else None
    return found if made is None else replace(found, block_k=made.block_k, whole=True)


def _inputs(p: Problem, place: torch.device) -> list[tuple[Any, ...]]:
    m, k, dtype = p["M"], p["K"], dtype_of(p)
    wide = (m, k), (m, k)  # x, then what is added or dy
    count = turns(2 * m * k, dtype)
    return [tuple(normal(place, dtype, *s) for s in (*wide, (k,), (k,))) for _ in range(count)]


def _run(p: Problem, c: DiagonalConfig) -> Callable[..., Any]:
    activation = p["activation"]

    def forward(x: Any, _: Any, weight: Any, bias: Any) -> Any:
        return backend.forward(x, weight, bias, activation, None, None, config=c)

    def backward(x: Any, dy: Any, weight: Any, bias: Any) -> Any:
        needs = True, True, True
        return backend.backward(dy, x, weight, bias, activation, needs, config=c)

    return forward if p["piece"] == "forward" else backward


KIND = Kind(
    draw=_draw,
    chosen=_chosen,
    candidates=lambda p: choices.candidates(p["piece"], p["M"], p["K"]),
    microseconds=lambda p, c: choices.microseconds(c, *_call(p)),
    inputs=_inputs,
    run=_run,
    terms=lambda p, c: choices.terms(c, *_call(p)),
    config=lambda _, fields: DiagonalConfig(**fields),
    group=lambda p: f"{p['piece']} {p['dtype']}",
    plans=backend._plans,
)
