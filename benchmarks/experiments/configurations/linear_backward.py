"""Triton's whole backward of linear_act: all rows in one tile, or tiles of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
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
from fastlinear.families.linear.triton import backward, backward_config
from fastlinear.families.linear.triton.config import (
    ONE_TILE_ROWS,
    BackwardConfig,
    TilesConfig,
    backward_config_for,
    whole_backward_may_pay,
)

_LARGEST = 1e8  # numbers of a weight
_ACTIVATIONS = ("none", "none", "relu", "silu", "gelu", "gelu_tanh")


def _draw(draw: Random) -> Problem | None:
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    rows = log_uniform(draw, draw.choice((ONE_TILE_ROWS, ONE_TILE_ROWS, 4096)))
    k, n = width(draw), width(draw)
    if k * n > _LARGEST or not whole_backward_may_pay(rows, k, n):
        return None
    activation = draw.choice(_ACTIVATIONS)
    return {"M": rows, "K": k, "N": n, "dtype": name_of(dtype), "activation": activation}


def _call(p: Problem) -> tuple[int, int, int, torch.dtype, str, bool]:
    return p["M"], p["K"], p["N"], dtype_of(p), p["activation"], (p["K"] | p["N"]) % 16 == 0


def _inputs(p: Problem, place: torch.device) -> list[tuple[Any, ...]]:
    m, k, n, dtype, activation, _ = _call(p)
    numbers = 2 * m * n + m * k + n * k
    return [
        (
            normal(place, dtype, m, n),
            None if activation == "none" else normal(place, dtype, m, n),
            normal(place, dtype, m, k),
            normal(place, dtype, n, k) / k**0.5,
        )
        for _ in range(turns(numbers, dtype))
    ]


def _run(p: Problem, c: backward_config.Config) -> Callable[..., Any]:
    def run(dy: Any, saved: Any, x: Any, weight: Any) -> Any:
        needs = True, True, True
        return backward.backward(dy, saved, x, weight, p["activation"], needs, config=c)

    return run


def _config(p: Problem, fields: dict[str, Any]) -> backward_config.Config:
    fields.pop("rates", None)
    return BackwardConfig(**fields) if "kind" in fields else TilesConfig(**fields)


def _chosen(p: Problem) -> backward_config.Config:
    found = backward_config_for(*_call(p))
    return _config(p, asdict(found))


KIND = Kind(
    draw=_draw,
    chosen=_chosen,
    candidates=lambda p: backward_config.candidates(*_call(p)),
    microseconds=lambda p, c: backward_config.microseconds(c, *_call(p)),
    inputs=_inputs,
    run=_run,
    terms=lambda p, c: backward_config.terms(c, *_call(p)),
    config=_config,
    group=lambda p: p["dtype"],
    plans=backward._plans,
)
