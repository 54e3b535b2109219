"""Triton's kernels of diagonal_linear: the forward, and the sweep of the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
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
from fastlinear.families.diagonal.triton import backend, backward_config, forward_config
from fastlinear.families.diagonal.triton.config import DiagonalConfig, cut

_MOST_ROWS, _UNITS = 1 << 17, 132
_ACTIVATIONS = ("none", "relu", "silu", "gelu")


def _drawn(draw: Random, most: int, activations: tuple[str, ...]) -> Problem | None:
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    m, k = log_uniform(draw, _MOST_ROWS), width(draw)
    if m * k > most:
        return None
    return {"M": m, "K": k, "dtype": name_of(dtype), "activation": draw.choice(activations)}


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


@lru_cache
def _forward_blocks() -> tuple[DiagonalConfig, ...]:
    """As ``_blocks``, of the forward; more numbers of a thread would spill."""
    columns, numbers = (128, 256, 512, 1024, 2048), (256, 512, 1024, 2048, 4096, 8192)
    tiles = product(columns, numbers, (1, 2, 4, 8), (1,), (0,))
    strips = product(columns, numbers[2:], (2, 4, 8), (1, 3), (4, 8, 16))
    found = (DiagonalConfig(*c) for c in (*tiles, *strips))
    held = ((c, c.numbers // (32 * c.warps)) for c in found)
    held = ((c, each) for c, each in held if 2 <= each <= (64 if c.per_unit == 0 else 32))
    return tuple(c for c, _ in held if c.numbers >= c.block_k)


def _forward_candidates(p: Problem) -> list[DiagonalConfig]:
    """Those whose programs have something to do; the next kernel begins as in what calls take."""
    (m, k, *_), found = _call(p), []
    early = forward_config.config_for(*_call(p)).early
    for c in _forward_blocks():
        made = cut(m, k, True, _UNITS, c)
        once = made.strips * made.block_m >= made.rows
        many = made.strips * made.blocks > 1024 * _UNITS and c.numbers < 4096
        large = m * k < c.numbers // 2 > 512 or (c.block_k > max(128, 2 * k) and m < 16)
        if not (once and c.per_unit > 0) and not many and not large:
            found.append(replace(c, early=early))
    return found


def _inputs(p: Problem, place: torch.device, forward: bool = False) -> list[tuple[Any, ...]]:
    m, k, dtype = p["M"], p["K"], dtype_of(p)
    count = turns(2 * m * k, dtype)
    shapes = ((m, k),) * (1 if forward else 2) + ((k,), (k,))
    return [tuple(normal(place, dtype, *s) for s in shapes) for _ in range(count)]


def _run(p: Problem, c: DiagonalConfig) -> Callable[..., Any]:
    def backward(x: Any, dy: Any, weight: Any, bias: Any) -> Any:
        needs = True, True, True
        return backend.backward(dy, x, weight, bias, p["activation"], needs, config=c)

    return backward


def _forward_run(p: Problem, c: DiagonalConfig) -> Callable[..., Any]:
    def forward(x: Any, weight: Any, bias: Any) -> Any:
        return backend.forward(x, weight, bias, p["activation"], None, None, config=c)

    return forward


BACKWARD = Kind(
    draw=partial(_drawn, most=1 << 26, activations=_ACTIVATIONS),
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
FORWARD = replace(
    BACKWARD,
    draw=partial(_drawn, most=1 << 27, activations=(*_ACTIVATIONS, "tanh")),
    chosen=lambda p: forward_config.config_for(*_call(p)),
    candidates=_forward_candidates,
    microseconds=lambda p, c: forward_config.microseconds(c, *_call(p)),
    inputs=partial(_inputs, forward=True),
    run=_forward_run,
    terms=lambda p, c: forward_config.terms(c, *_call(p)),
    serves=lambda _, c: c.per_unit == 0,  # others gained nothing
)
