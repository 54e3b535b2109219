"""Triton's whole backward of linear_act: all rows in one tile, or tiles of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
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
    whole_backward_may_pay,
)

_LARGEST = 1e8  # numbers of a weight
_KINDS = "fma", "dot", "tiles"
_ACTIVATIONS = ("none", "none", "relu", "silu", "gelu", "gelu_tanh")


def _draw(draw: Random) -> Problem | None:
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    rows = log_uniform(draw, draw.choice((ONE_TILE_ROWS, ONE_TILE_ROWS, 4096)))
    k, n = width(draw), width(draw)
    if k * n > _LARGEST or not whole_backward_may_pay(rows, k, n):
        return None
    activation = draw.choice(_ACTIVATIONS)
    return {"M": rows, "K": k, "N": n, "dtype": name_of(dtype), "activation": activation}


def _call(p: Problem) -> tuple[int, int, int, torch.dtype, str, tuple[bool, bool]]:
    wide = p["K"] % 16 == 0, p["N"] % 16 == 0
    return p["M"], p["K"], p["N"], dtype_of(p), p["activation"], wide


@lru_cache
def _blocks(size: int) -> tuple[backward_config.Config, ...]:
    """Many more than calls choose from, of numbers of so many bytes."""
    every = product((16, 32, 64, 128), (32, 64, 128, 256), (4, 8))
    found: list[backward_config.Config]
    found = [BackwardConfig("fma", k, n, 64, 64, warps, 1) for k, n, warps in every]
    shapes = product((16, 32, 64, 128), (16, 32) if size == 4 else (32, 64, 128, 256))
    tiles = (32, 32), (64, 32), (64, 64), (128, 32), (128, 64), (64, 128)
    for dx, dw, warps, stages in product(shapes, tiles, (4, 8), (2, 3, 4)):
        found.append(BackwardConfig("dot", *dx, *dw, warps, stages))
    sides = (32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128)
    depths, chunks = ((16,), (2, 4)) if size == 4 else ((32, 64, 128), (1,))
    of_tiles = product(sides, depths, sides, depths, (4, 8), (2, 3, 4), chunks)
    for (m, k), n, (dw_n, dw_k), dw_m, warps, stages, several in of_tiles:
        found.append(TilesConfig(m, k, n, dw_n, dw_k, dw_m, warps, stages, chunks=several))
    return tuple(found)


def _candidates(p: Problem) -> list[backward_config.Config]:
    call = _call(p)
    return list(backward_config.candidates(*call, blocks=_blocks(call[3].itemsize)))


def _serves(p: Problem, c: backward_config.Config) -> bool:
    """Whether a row of it tells of others: what spills is a case of its own."""
    m, _, n, dtype, activation, wide = _call(p)
    return backward_config.fits(c, m, n, dtype, activation, wide)


def _terms(p: Problem, c: backward_config.Config) -> tuple[float, ...]:
    """Each kind of configuration has terms of its own."""
    mine, kind = backward_config.terms(c, *_call(p)), backward_config.kind_of(c)
    kinds = ((v * (kind == other) for v in mine) for other in _KINDS)
    return tuple(value for values in kinds for value in values)


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
    return BackwardConfig(**fields) if "kind" in fields else TilesConfig(**fields)


KIND = Kind(
    draw=_draw,
    chosen=lambda p: backward_config.config_for(*_call(p)),
    candidates=_candidates,
    microseconds=lambda p, c: backward_config.microseconds(c, *_call(p)),
    inputs=_inputs,
    run=_run,
    terms=_terms,
    config=_config,
    group=lambda p: p["dtype"],
    serves=_serves,
    plans=backward._plans,
)
