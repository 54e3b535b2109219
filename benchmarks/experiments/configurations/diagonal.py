"""Triton's sweep of diagonal_linear's backward."""

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
from fastlinear.families.diagonal.triton import backend, backward_config
from fastlinear.families.diagonal.triton.config import DiagonalConfig

_MOST_ROWS, _MOST_NUMBERS = 1 << 17, 1 << 26
_ACTIVATIONS = ("none", "relu", "silu", "gelu")


def _draw(draw: Random) -> Problem | None:
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    m, k = log_uniform(draw, _MOST_ROWS), width(draw)
    if m * k > _MOST_NUMBERS:
        return None
    return {"M": m, "K": k, "dtype": name_of(dtype), "activation": draw.choice(_ACTIVATIONS)}


def _call(p: Problem) -> tuple[int, int, int, str]:
    return p["M"], p["K"], dtype_of(p).itemsize, p["activation"]


@lru_cache
def _blocks() -> tuple[DiagonalConfig, ...]:
    """Many more than calls choose from."""
    columns, numbers = (32, 64, 128, 256, 512, 1024), (512, 1024, 2048, 4096, 8192)
    warps = 1, 2, 4, 8
    strips = product(columns, numbers, warps, (1, 3, 4, 5), (1, 2, 4, 8), ("first", "last"))
    whole = product((16, *columns), numbers, warps, (1, 2, 3), (0,), ("last",), (True,))
    found = [*(DiagonalConfig(*c) for c in strips), *(DiagonalConfig(*c) for c in whole)]
    held = ((c, c.numbers // (32 * c.warps)) for c in found)
    most = {1: 32}  # numbers of a thread; more that are on their way spill
    held = ((c, each) for c, each in held if 4 <= each <= most.get(c.stages, 16))
    return tuple(c for c, _ in held if c.numbers >= c.block_k)


def _inputs(p: Problem, place: torch.device) -> list[tuple[Any, ...]]:
    m, k, dtype = p["M"], p["K"], dtype_of(p)
    count = turns(2 * m * k, dtype)
    shapes = (m, k), (m, k), (k,), (k,)
    return [tuple(normal(place, dtype, *s) for s in shapes) for _ in range(count)]


def _run(p: Problem, c: DiagonalConfig) -> Callable[..., Any]:
    def backward(x: Any, dy: Any, weight: Any, bias: Any) -> Any:
        needs = True, True, True
        return backend.backward(dy, x, weight, bias, p["activation"], needs, config=c)

    return backward


KIND = Kind(
    draw=_draw,
    chosen=lambda p: backward_config.config_for(*_call(p)),
    candidates=lambda p: list(backward_config.candidates(p["M"], p["K"], _blocks())),
    microseconds=lambda p, c: backward_config.microseconds(c, *_call(p)),
    inputs=_inputs,
    run=_run,
    terms=lambda p, c: backward_config.terms(c, *_call(p)),
    config=lambda _, fields: DiagonalConfig(**fields),
    group=lambda p: p["dtype"],
    plans=backend._plans,
)
