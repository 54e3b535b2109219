"""Every way to launch the whole backward of linear_act, and what its launches take time for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from operator import mul
from typing import Any

import torch

from fastlinear.families.linear.triton.config import (
    ONE_TILE_ROWS,
    BackwardConfig,
    TilesConfig,
)
from fastlinear.families.linear.triton.gemm_config import UNITS

Config = BackwardConfig | TilesConfig

_UNITS = UNITS[90]
_SHARED_LIMIT = 232_448  # bytes a Hopper block may have
_SHARED_OF_A_UNIT, _SHARED_OF_A_BLOCK = 233_472, 1_024  # what one has, and takes besides
_REGISTERS, _THREADS, _BLOCKS = 65_536, 2048, 32  # of a multiprocessor
_SLICES = (1, 2, 3, 4, 6, 8, 12, 16)
_LEAST_SLICE = 64  # rows of W
_FMA_ROWS = 4
_NUMBERS = 64  # of a block that a thread forms or sums at once
_PROGRAMS = 64  # for each multiprocessor: more of them have too little to do
_MOST_TRANSCENDENTAL = ("gelu", "gelu_tanh", "mish")
_FROM_OUTPUT = ("relu", "leaky_relu", "relu2", "sigmoid", "tanh")
TERMS = (
    *("start", "launches more", "first trips", "steps of dx", "steps of dW"),
    *("10 million products of dx", "10 million products of dW", "100 KB of loads of dx"),
    *("100 KB of loads of dW", "10,000 loads one by one", "10,000 derivatives"),
    *("10,000 dearer ones", "10,000 dearest", "100 KB of slices", "100 KB of memory"),
    *("100 KB of stores", "thousand programs"),
)
_US = {
    4: (2.0, 1.5, 0.6, 0.35, 0.5, 30.0, 30.0, 0.7, 0.7, 0.3, 0.05, 0.1, 0.15, 3.0, 2.5, 0.5, 0.3),
    2: (2.0, 1.5, 0.6, 0.30, 0.5, 3.0, 3.0, 0.7, 0.7, 0.3, 0.05, 0.1, 0.15, 3.0, 2.5, 0.5, 0.3),
}
"""Size of a number → microseconds of each of ``TERMS``: guesses, by which a sweep draws."""


def cost_class(activation: str) -> int:
    """0 without a derivative, 1 of one that needs no exponential, 2 of one that does, 3 of those
    that need several or long polynomials."""
    if activation == "none":
        return 0
    if activation in _FROM_OUTPUT:
        return 1
    return 3 if activation in _MOST_TRANSCENDENTAL else 2


def candidates(
    M: int, K: int, N: int, dtype: torch.dtype, activation: str, aligned: bool = True
) -> list[Config]:
    """Configurations that fit into registers and shared memory and leave no program idle.

    Args:
        M, K, N: x is (M, K), weight (N, K).
        dtype: of all tensors.
        activation: its name.
        aligned: as for ``config.tiles_config_for``.
    """
    size, first = dtype.itemsize, (False, True) if activation != "none" else (False,)
    found: list[Config] = []
    every: Iterable[Any]
    how: list[Any]
    if M <= _FMA_ROWS:
        every = product((16, 32, 64, 128), (32, 64, 128, 256), (4, 8), (1, 3), _SLICES)
        found += [BackwardConfig("fma", k, n, 64, 64, *rest) for k, n, *rest in every]
    if M <= ONE_TILE_ROWS:
        shapes = product((16, 32, 64, 128), (16, 32) if size == 4 else (32, 64, 128, 256))
        tiles = (32, 32), (64, 32), (64, 64), (128, 32), (128, 64), (64, 128), (128, 128)
        how = list(product(tiles, (4, 8), (2, 3, 4), _SLICES, first))
        found += [BackwardConfig("dot", *dx, *dw, *rest) for dx in shapes for (dw, *rest) in how]
    if M > 16:
        found += [c for c in _tiles(size) if c.dpre_first in first]
    return [c for c in found if _fits(c, M, K, N, size, aligned)]


def _tiles(size: int) -> list[TilesConfig]:
    sides = (32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128)
    depths, chunks = ((16,), (2, 4)) if size == 4 else ((32, 64, 128), (1,))
    every = product(sides, depths, sides, depths, (4, 8), (2, 3, 4), (False, True), chunks)
    return [
        TilesConfig(*(m, k, n, dw_n, dw_k, dw_m), warps, stages, first, several)
        for (m, k), n, (dw_n, dw_k), dw_m, warps, stages, first, several in every
    ]


def _fits(c: Config, M: int, K: int, N: int, size: int, aligned: bool) -> bool:
    threads = 32 * c.warps
    if isinstance(c, BackwardConfig):
        strips, tiles = -(-K // c.dx_k), -(-N // c.dw_n) * -(-K // c.dw_k)
        if c.slices > 1 and c.slices * max(_LEAST_SLICE, c.dx_n) > N:
            return False
        rows = M if c.kind == "fma" else c.block_m(M)
        most = _NUMBERS if aligned and size < 4 else _NUMBERS // 2
        if c.kind == "fma":
            held = c.dx_k * c.dx_n // threads
            inside = 2 <= held <= 32 and held * (rows + 2) <= 128
            return inside and strips * c.slices <= _PROGRAMS * _UNITS
        blocks = rows * c.dx_n, rows * c.dx_k, c.dx_n * c.dx_k, rows * c.dw_n, rows * c.dw_k
        if max(*blocks, c.dw_n * c.dw_k) > most * threads:
            return False
        programs = strips * c.slices + tiles
    else:
        dx, dw = c.dx_m * c.dx_k, c.dw_n * c.dw_k
        formed = max(c.dx_m * c.dx_n, c.dw_n * c.dw_m) * c.chunks
        loaded = max(c.dx_n * c.dx_k, c.dw_m * c.dw_k) * c.chunks
        most = 96 if aligned and size < 4 else 64
        if max(dx, dw) + max(formed, loaded) > most * threads or c.dx_m >= 2 * max(M, 32):
            return False
        if c.dw_m >= 2 * max(M, 16):
            return False
        programs = -(-M // c.dx_m) * -(-K // c.dx_k) + -(-N // c.dw_n) * -(-K // c.dw_k)
    if programs > _PROGRAMS * _UNITS and min(c.dw_n * c.dw_k, c.dx_k * 64) < 4096:
        return False
    return _shared_bytes(c, M, size, saved=not c.dpre_first) <= _SHARED_LIMIT


def _shared_bytes(c: Config, M: int, size: int, saved: bool) -> int:
    """About what a program has: the load pipeline's blocks of W, dy and what was saved."""
    if isinstance(c, TilesConfig):
        dx = c.stages * c.dx_n * (c.dx_k + (1 + saved) * c.dx_m)
        dw = c.stages * c.dw_m * (c.dw_k + (1 + saved) * c.dw_n)
        return max(dx, dw) * c.chunks * size
    rows = c.block_m(M)
    if c.kind == "fma":
        return c.stages * c.dx_n * c.dx_k * size
    dx = max(1, c.stages - 1) * c.dx_n * (c.dx_k + (1 + saved) * rows)
    return max(dx, rows * (c.dw_n + c.dw_k), c.dw_n * c.dw_k) * size


def _resident(c: Config, M: int, size: int, saved: bool) -> int:
    """About how many programs a multiprocessor holds at once."""
    threads = 32 * c.warps
    if isinstance(c, TilesConfig):
        held = max(c.dx_m * c.dx_k + c.dx_m * c.dx_n, c.dw_n * c.dw_k + c.dw_n * c.dw_m)
    elif c.kind == "fma":
        held = c.dx_k * c.dx_n * (M + 2)
    else:
        rows = c.block_m(M)
        held = max(rows * (c.dx_k + c.dx_n), c.dw_n * c.dw_k + rows * c.dw_n)
    registers = min(255, 48 + held // threads)
    shared = _shared_bytes(c, M, size, saved) + _SHARED_OF_A_BLOCK
    fit = _REGISTERS // (registers * threads), _THREADS // threads, _SHARED_OF_A_UNIT // shared
    return max(1, min(_BLOCKS, *fit))


def microseconds(
    c: Config, M: int, K: int, N: int, dtype: torch.dtype, activation: str, aligned: bool = True
) -> float:
    """About how long the backward takes on a Hopper."""
    return sum(map(mul, _US[dtype.itemsize], terms(c, M, K, N, dtype, activation, aligned)))


def terms(
    c: Config, M: int, K: int, N: int, dtype: torch.dtype, activation: str, aligned: bool = True
) -> tuple[float, ...]:
    """What the launches take time for, in the order of ``TERMS``; work is a multiprocessor's share
    of it, trips and steps are those of the programs that follow each other on one."""
    size, kind = dtype.itemsize, cost_class(activation)
    saved = kind > 0 and not c.dpre_first
    if isinstance(c, TilesConfig):
        rows, slices = c.dx_m, 1
        dx_programs = -(-M // c.dx_m) * -(-K // c.dx_k)
        dx_steps = -(-N // (c.dx_n * c.chunks)) * c.chunks
        dw_steps = -(-M // (c.dw_m * c.chunks)) * c.chunks
        dw_m, extra = c.dw_m, -(-N // c.dw_n)
    else:
        rows = M if c.kind == "fma" else c.block_m(M)
        blocks = -(-N // c.dx_n)
        dx_steps = -(-blocks // min(c.slices, blocks))
        slices = -(-blocks // dx_steps)
        dx_programs = -(-K // c.dx_k) * slices
        dw_m, dw_steps, extra = rows, 1, 0
    fma = isinstance(c, BackwardConfig) and c.kind == "fma"
    dw_programs = 0 if fma else -(-N // c.dw_n) * -(-K // c.dw_k)
    programs = dx_programs + dw_programs + extra
    at_once = _UNITS * _resident(c, M, size, saved)
    dx_all, dw_all = dx_programs * dx_steps / _UNITS, dw_programs * dw_steps / _UNITS
    dx_formed, dw_formed = dx_all * rows * c.dx_n, dw_all * dw_m * c.dw_n
    formed = 0.0 if not kind else M * N / _UNITS if not saved else dx_formed + dw_formed
    dx_loads = dx_all * c.dx_k * c.dx_n + dx_formed * (1 + saved)
    dw_loads = dw_all * c.dw_k * dw_m + dw_formed * (1 + saved)
    first = c.dpre_first and kind > 0
    memory = N * K + M * K + M * N * (2 + saved + 3 * first)
    return (
        1.0,
        float((slices > 1) + first),
        programs / at_once + 1,
        dx_steps * -(-dx_programs // at_once),
        dw_steps * dw_programs / at_once,
        dx_all * rows * c.dx_k * c.dx_n / 1e7,
        dw_all * dw_m * c.dw_k * c.dw_n / 1e7,
        dx_loads * size / 1e5,
        dw_loads * size / 1e5,
        0.0 if aligned else (dx_loads + dw_loads) / 1e4,
        formed * (kind == 1) / 1e4,
        formed * (kind == 2) / 1e4,
        formed * (kind == 3) / 1e4,
        slices * M * K * 8 * (slices > 1) / _UNITS / 1e5,
        memory * size / _UNITS / 1e5,
        (N * K + M * K) * size / _UNITS / 1e5,
        programs / 1e3,
    )
