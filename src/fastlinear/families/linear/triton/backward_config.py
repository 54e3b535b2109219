"""Launch configurations of linear_act's whole backward, chosen by a model of their time.

The microseconds of the terms were fitted to launches of drawn configurations on drawn sizes, on an
H200 (``results/nvidia-h200/linear-backward.jsonl.gz``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import torch

from fastlinear.families.linear.triton.config import (
    ONE_TILE_ROWS,
    TF32X3_MIN_DEPTH,
    TF32X3_MIN_ROWS,
    BackwardConfig,
    TilesConfig,
)
from fastlinear.families.linear.triton.gemm_config import UNITS

Config = BackwardConfig | TilesConfig

_SHARED_LIMIT = 101_376  # bytes a block may have on every chip
_SHARED_OF_A_UNIT, _SHARED_OF_A_BLOCK = 233_472, 1_024  # what one has, and takes besides
_REGISTERS, _THREADS, _BLOCKS = 65_536, 2048, 32  # of a multiprocessor
_SLICES = (1, 2, 3, 4, 6, 8, 12, 16)
_LEAST_SLICE = 64  # rows of W
_FMA_ROWS = 4
_FEWEST_TILE_ROWS = {2: 33, 4: 65}  # fewer are faster in one tile, by size of a number
_NUMBERS, _TILE_NUMBERS = 64, 96  # a thread holds at once, where 16 bytes are loaded at once
_LARGE = 8192  # results of a tile for which eight warps pay
_WARPGROUP_ROWS = 64
_MOST_TRANSCENDENTAL = ("gelu", "gelu_tanh", "mish")
_FROM_OUTPUT = ("relu", "leaky_relu", "relu2", "sigmoid", "tanh")
_DERIVATIVES = (0, 1, 3, 4)  # about what one takes, by class
BLOCKS: dict[int, tuple[Config, ...]] = {
    2: (
        *(BackwardConfig("dot", 16, 32, 32, 32, 4, 4), BackwardConfig("dot", 32, 32, 32, 32, 8, 3)),
        *(BackwardConfig("dot", 16, n, 64, 64, 8, 3) for n in (64, 128)),
        BackwardConfig("dot", 16, 64, 64, 32, 4, 4),
        BackwardConfig("dot", 16, 128, 64, 64, 4, 4),
        BackwardConfig("dot", 32, 64, 128, 32, 4, 4),
        BackwardConfig("dot", 32, 128, 128, 64, 4, 4),
        BackwardConfig("dot", 32, 128, 128, 64, 8, 3),
        *(BackwardConfig("dot", 64, n, 128, 32, 4, 4) for n in (32, 64)),
        BackwardConfig("dot", 64, 64, 64, 64, 8, 4),
        BackwardConfig("dot", 128, 32, 128, 32, 4, 4),
        TilesConfig(32, 32, 64, 64, 64, 32, 4, 4),
        TilesConfig(32, 32, 128, 32, 32, 128, 4, 4),
        TilesConfig(32, 32, 128, 64, 64, 64, 4, 4),
        TilesConfig(64, 32, 128, 64, 32, 128, 8, 4),
        TilesConfig(64, 64, 32, 32, 64, 64, 4, 3),
        TilesConfig(64, 64, 64, 32, 32, 128, 4, 3),
        TilesConfig(64, 64, 64, 64, 64, 64, 4, 3),
    ),
    4: (
        *(BackwardConfig("fma", 16, n, warps=4, stages=1) for n in (32, 64)),
        BackwardConfig("dot", 16, 16, 32, 32, 4, 4),
        BackwardConfig("dot", 16, 16, 64, 64, 8, 4),
        *(BackwardConfig("dot", 16, 32, 32, 32, warps, 4) for warps in (4, 8)),
        BackwardConfig("dot", 16, 32, 64, 32, 8, 4),
        *(BackwardConfig("dot", 16, 32, 64, 64, warps, 4) for warps in (4, 8)),
        *(BackwardConfig("dot", 32, 32, 64, 32, 4, stages) for stages in (3, 4)),
        BackwardConfig("dot", 32, 32, 64, 64, 8, 4),
        BackwardConfig("dot", 32, 32, 128, 32, 4, 4),
        BackwardConfig("dot", 64, 32, 64, 64, 8, 4),
        *(TilesConfig(32, 32, 16, 32, 32, 16, 4, 4, chunks=chunks) for chunks in (2, 4)),
        TilesConfig(32, 64, 16, 32, 64, 16, 4, 3, chunks=2),
    ),
}
"""Size of a number → what calls choose from: others gained 1% together on 300 drawn calls."""
TERMS = (
    *("start", "sum of slices", "derivative first", "programs", "steps by stages of loads"),
    *("steps of eight warps", "million products of a warp in a warpgroup"),
    *("million multiply-adds of a warp", "1,000 operands of a warp"),
    *("100 numbers of a thread one by one", "100 derivatives of a thread"),
    *("steps of db", "100 KB of memory", "100 KB of slices"),
)
_US: dict[tuple[str, int], tuple[float, ...]] = {
    ("fma", 4): (
        *(0.6373, 0.6895, 0.0, 0.7151, 0.1524, 0.1285, 0.0),
        *(339.0, 19.33, 8.809, 7.259, 0.0, 2.49, 0.0),
    ),
    ("dot", 2): (
        *(1.11, 1.126, 1.044, 0.5959, 0.1318, 0.09904, 3.29),
        *(0.0, 2.861, 1.673, 0.8796, 0.0, 1.952, 5.565),
    ),
    ("dot", 4): (
        *(0.6248, 0.9405, 1.054, 0.6798, 0.248, 0.1564, 52.05),
        *(56.7, 11.57, 1.844, 1.097, 0.0, 2.757, 20.41),
    ),
    ("tiles", 2): (
        *(0.0, 0.0, 2.618, 1.282, 0.4468, 0.1081, 1.108),
        *(0.0, 1.382, 1.448, 0.5737, 0.4874, 1.678, 0.0),
    ),
    ("tiles", 4): (
        *(0.0, 0.0, 2.646, 1.896, 1.015, 0.0, 25.81),
        *(391.2, 1.877, 0.9465, 0.5855, 0.4432, 8.245, 0.0),
    ),
}
"""Kind of configuration and size of a number → microseconds of each of ``TERMS``. Few tiles of
float32 were timed: that a derivative comes first takes them what it takes tiles of 16 bits."""


def kind_of(c: Config) -> str:
    """``"fma"``, ``"dot"`` or ``"tiles"``."""
    return c.kind if isinstance(c, BackwardConfig) else "tiles"


@lru_cache(maxsize=1024)
def config_for(
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    activation: str,
    wide: tuple[bool, bool] = (True, True),
) -> Config:
    """The configuration of the whole backward that should take least.

    Args:
        M, K, N: x is (M, K), weight (N, K).
        dtype: of all tensors.
        activation: its name.
        wide: of x and weight, and of dy and what was saved: whether each has one unit stride, and
            rows of whole multiples of 16 numbers. Triton then loads 16 bytes at once.
    """
    call = M, K, N, dtype, activation, wide
    return min(candidates(*call), key=lambda c: microseconds(c, *call))


def candidates(
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    activation: str,
    wide: tuple[bool, bool] = (True, True),
    blocks: Sequence[Config] | None = None,
) -> Iterator[Config]:
    """Those of ``blocks`` that fit, in slices as well, and with the derivative formed first."""
    first = (False, True) if activation != "none" else (False,)
    for block in BLOCKS[dtype.itemsize] if blocks is None else blocks:
        for early in first:
            c = replace(block, dpre_first=early)
            if fits(c, M, N, dtype, activation, wide):
                yield c
                if isinstance(c, BackwardConfig):
                    most = N // max(_LEAST_SLICE, c.dx_n)
                    yield from (replace(c, slices=s) for s in _SLICES[1:] if s <= most)


def fits(
    c: Config, M: int, N: int, dtype: torch.dtype, activation: str, wide: tuple[bool, bool]
) -> bool:
    """Whether threads hold what they load, and tiles are no taller than x."""
    single, threads, derived = dtype.itemsize == 4, 32 * c.warps, _cost_class(activation)
    odd = not all(wide)
    roomy = not odd and not single
    saved = derived > 0 and not c.dpre_first
    if isinstance(c, TilesConfig):
        dx, dw = c.dx_m * c.dx_k, c.dw_n * c.dw_k
        formed = max(c.dx_m * c.dx_n, c.dw_n * c.dw_m) * c.chunks * (2 if saved and odd else 1)
        loaded = max(c.dx_n * c.dx_k, c.dw_m * c.dw_k) * c.chunks
        if max(dx, dw) + max(formed, loaded) > (_TILE_NUMBERS if roomy else _NUMBERS) * threads:
            return False
        shares = (_warps(r, k, c.warps)[1] for r, k in ((c.dx_m, c.dx_k), (c.dw_n, c.dw_k)))
        if max(shares) > 2:  # each of so many warps forms all
            return False
        large = max(dx, dw) >= _LARGE
        if (c.warps == 4 and large) or (single and (c.warps == 8 or c.chunks > (2 if odd else 4))):
            return False
        tall = c.dx_m >= 2 * max(M, 32) or c.dw_m >= 2 * max(M, 16)
        if tall or _FEWEST_TILE_ROWS[dtype.itemsize] > M or (single and saved and derived > 1):
            return False
    elif c.kind == "fma":
        held = c.dx_k * c.dx_n // threads
        few = single and M <= _FMA_ROWS and c.stages == 1 and not c.dpre_first
        return few and held >= 2 and held * (M + 2) <= 96
    else:
        if M > ONE_TILE_ROWS:
            return False
        rows, result = c.block_m(M), c.dw_n * c.dw_k
        blocks = rows * c.dx_n, rows * c.dx_k, c.dx_n * c.dx_k, rows * c.dw_n, rows * c.dw_k
        if max(*blocks, result) > (_NUMBERS if roomy else _NUMBERS // 2) * threads:
            return False
        if single and M < TF32X3_MIN_ROWS and result * rows > 512 * threads:
            return False
        narrow = rows == ONE_TILE_ROWS and c.dw_n < _WARPGROUP_ROWS
        if single and (narrow or result >= _LARGE):
            return False
    return _shared_bytes(c, M, dtype.itemsize, saved) <= _SHARED_LIMIT


def microseconds(
    c: Config,
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    activation: str,
    wide: tuple[bool, bool] = (True, True),
    units: int = UNITS[90],
) -> float:
    """About how long the backward takes."""
    us = _US[kind_of(c), dtype.itemsize]
    return sum(map(mul, us, terms(c, M, K, N, dtype, activation, wide, units)))


def start_us(c: Config, dtype: torch.dtype) -> float:
    """Microseconds of a backward before it computes anything."""
    return _US[kind_of(c), dtype.itemsize][0]


class _Part(NamedTuple):
    """Programs of one kind, each of which adds up one tile.

    Attributes:
        programs: how many.
        steps: of one.
        rows, cols, depth: of the tile, and of one step; ``rows`` by ``depth`` are of dpre.
        exact: whether products are float32 multiply-adds.
    """

    programs: int
    steps: int
    rows: int
    cols: int
    depth: int
    exact: bool


def _parts(c: Config, M: int, K: int, N: int, single: bool) -> tuple[_Part, ...]:
    """Programs of dx, then of dW."""
    exact = single and N < TF32X3_MIN_DEPTH, single and M < TF32X3_MIN_ROWS
    tiles = -(-N // c.dw_n) * -(-K // c.dw_k)
    if isinstance(c, TilesConfig):
        dx_n, dw_m = c.dx_n * c.chunks, c.dw_m * c.chunks
        programs = -(-M // c.dx_m) * -(-K // c.dx_k)
        dx = _Part(programs, -(-N // dx_n), c.dx_m, c.dx_k, dx_n, exact[0])
        return dx, _Part(tiles, -(-M // dw_m), c.dw_n, c.dw_k, dw_m, exact[1])
    slices = _slices(c, N)
    steps = -(-N // (c.dx_n * slices))
    fma = c.kind == "fma"
    rows = M if fma else c.block_m(M)
    dx = _Part(-(-K // c.dx_k) * slices, steps, rows, c.dx_k, c.dx_n, fma or exact[0])
    return (dx,) if fma else (dx, _Part(tiles, 1, c.dw_n, c.dw_k, rows, exact[1]))


def _slices(c: Config, N: int) -> int:
    if isinstance(c, TilesConfig):
        return 1
    blocks = -(-N // c.dx_n)
    return -(-blocks // -(-blocks // min(c.slices, blocks)))


def terms(
    c: Config,
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    activation: str,
    wide: tuple[bool, bool] = (True, True),
    units: int = UNITS[90],
) -> tuple[float, ...]:
    """What the launches take time for, in the order of ``TERMS``: work is that of the program that
    takes longest, and of a multiprocessor's share of all programs."""
    size, derived = dtype.itemsize, _cost_class(activation)
    saved, first = derived > 0 and not c.dpre_first, derived > 0 and c.dpre_first
    each = _DERIVATIVES[derived] * saved
    parts = [
        (p.programs, _program(c, p, size, saved, each, wide)) for p in _parts(c, M, K, N, size == 4)
    ]
    if isinstance(c, TilesConfig) and not first:
        steps = -(-M // c.dw_m)
        formed = steps * c.dw_m * c.dw_n * each / (3200 * c.warps)
        parts.append((-(-N // c.dw_n), (1.0, *(0.0,) * 6, formed, float(steps))))
    longest = max((work for _, work in parts), key=lambda work: sum(map(mul, _ROUGHLY, work)))
    at_once = units * _resident(c, M, size, saved)
    shares = (sum(n * work[i] for n, work in parts) / at_once for i in range(len(longest)))
    slices = _slices(c, N)
    memory = N * K * 2 + M * K * 2 + M * N * (1 + saved + 3 * first)
    return (
        *(1.0, float(slices > 1), float(first)),
        *(most + share for most, share in zip(longest, shares, strict=True)),
        memory * size / units / 1e5,
        slices * M * K * 8 * (slices > 1 and kind_of(c) == "dot") / units / 1e5,
    )


_ROUGHLY = (0.8, 0.35, 0.1, 2.0, 40.0, 2.0, 1.0, 1.0, 0.4)  # µs, to tell the longest program


def _program(
    c: Config, p: _Part, size: int, saved: bool, each: int, wide: tuple[bool, bool]
) -> tuple[float, ...]:
    """What one program takes time for: from its own start to steps of db."""
    threads, more = 32 * c.warps, (1.0 + p.steps) * (c.warps == 8)
    formed, loaded = p.steps * p.rows * p.depth, p.steps * p.cols * p.depth
    if kind_of(c) == "fma":
        multiplied = formed * p.cols / c.warps / 1e6
        summed = p.rows * p.cols * p.depth / threads / 1e3
        rest = loaded * (not wide[0]) / threads / 1e2, formed * each / 1e4, 0.0
        return (1.0, float(p.steps), more, 0.0, multiplied, summed, *rest)
    together = p.rows >= _WARPGROUP_ROWS and not p.exact
    tall, broad = _warps(p.rows, p.cols, c.warps)
    ahead = max(1, c.stages - 1) if all(wide) or size == 4 else 1
    products = formed * p.cols / c.warps / 1e6
    taken = p.rows / tall + (0 if together and size == 2 else p.cols / broad)
    alone = formed * (1 + saved) * (not wide[1]) + loaded * (not wide[0])
    often = broad if isinstance(c, TilesConfig) and not p.exact else 1  # each of them forms all
    return (
        *(1.0, p.steps / ahead, more, products * together, products * p.exact),
        0.0 if p.exact else p.steps * p.depth * taken / 32 / 1e3,
        *(alone / threads / 1e2, often * formed * each / threads / 1e2, 0.0),
    )


def _warps(rows: int, cols: int, warps: int) -> tuple[int, int]:
    """How many of a program's warps share a tile's rows, and its columns."""
    tall, broad = (4, 1) if rows >= _WARPGROUP_ROWS else (1, 1)
    while tall * broad < warps:
        taller = rows >= _WARPGROUP_ROWS or rows * broad >= cols * tall
        if taller and tall * 16 < rows:
            tall *= 2
        else:
            broad *= 2
    return tall, broad


def _cost_class(activation: str) -> int:
    """0 without a derivative, 1 of one that needs no exponential, 2 of one that does, 3 of those
    that need several or long polynomials."""
    if activation == "none":
        return 0
    if activation in _FROM_OUTPUT:
        return 1
    return 3 if activation in _MOST_TRANSCENDENTAL else 2


def _shared_bytes(c: Config, M: int, size: int, saved: bool) -> int:
    """About what a program has: the load pipeline's blocks of W, dy and what was saved."""
    if isinstance(c, TilesConfig):
        dx = c.stages * c.dx_n * (c.dx_k + (1 + saved) * c.dx_m)
        dw = c.stages * c.dw_m * (c.dw_k + (1 + saved) * c.dw_n)
        return max(dx, dw) * c.chunks * size
    rows = c.block_m(M)
    if c.kind == "fma":
        return c.stages * c.dx_n * c.dx_k * size
    ahead = c.stages - (size == 2)
    dx = max(1, ahead) * c.dx_n * (c.dx_k + (1 + saved) * rows)
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
