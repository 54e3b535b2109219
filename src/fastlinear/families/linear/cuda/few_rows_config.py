"""Which calls the CUDA kernels of few rows serve, and in which shape: pure data, pure choices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from operator import mul

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_ROWS = {4: 16, 2: 64}  # itemsize → rows
_SHARED_LIMIT = 232_448  # bytes a Hopper block may have
_SHARED_OF_A_UNIT, _SHARED_OF_A_BLOCK = 233_472, 1_024  # what one has, and takes besides
# Of what a multiprocessor has, this much at most: the rest is its L1, through which all weights
# come. A launch that begins early behind a kernel with all of it else keeps that division, and
# what is left for L1 (28 KiB) holds too few loads under way: 76.6 us instead of 88.5 for a gated
# MLP of 4096 -> 11008.
_POOL, POOL_PERCENT = 135_168, 50
_MAX_SIZE = 1 << 30
_MAX_STRIDE = (1 << 31) - 1
_REGISTERS, _THREADS = 65_536, 2048
_OTHER_REGISTERS, _MORE_REGISTERS = 24, 40  # in 16 bits, in float32
_UNITS = 132
_HOLD = {1: 132, 2: 132, 4: 124, 8: 120}
"""Blocks of a cluster → multiprocessors that clusters find room on: they cross no GPC's border."""
_L2_BYTES = 40_000_000  # what it keeps of weights
TURNS, TURN_BYTES = 24, 120_000_000  # most weights that are read in turn, and their size
_LOADERS = 16  # warps that ask for all that a multiprocessor can load
TERMS = (
    *("start", "clusters", "thousand blocks", "trips to the weights", "10 KB of sums"),
    *("100 KB of x", "10 million products", "100 KB of a warp", "100 KB of the busiest"),
    "100 KB of all out of memory",
)
_US = {
    4: (0.7599, 0.602, 1.218, 0.2731, 0.6522, 1.34, 21.13, 3.713, 0.8302, 1.634),
    2: (0.9196, 0.5486, 1.456, 0.4465, 0.1042, 0.9021, 8.339, 2.486, 0.6102, 2.313),
}
"""Size of a number → microseconds of each of ``TERMS``: fitted to 37,700 launches on an H200 by
``python -m benchmarks.experiments.configurations``."""


@dataclass(frozen=True)
class SingleConfig:
    """Shape of the float32 kernel.

    Attributes:
        cols: outputs of a thread; a block has four times as many.
        warps: of a block, side by side along K.
        steps: pieces of 32 numbers along K that a warp has under way.
        cluster: blocks that share outputs and take K in turns.
    """

    cols: int
    warps: int
    steps: int
    cluster: int = 1

    @property
    def block_n(self) -> int:
        """Outputs of a cluster."""
        return 4 * self.cols

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def span(self) -> int:
        """K that a block takes at a time."""
        return self.warps * self.steps * 32

    def many(self, K: int) -> bool:
        """Whether a block takes more than one span."""
        return self.span * self.cluster < K

    def shared_bytes(self, rows: int, K: int) -> int:
        """Dynamic shared memory: x, twice where the next span is loaded ahead."""
        return (1 + self.many(K)) * rows * self.span * 4

    def static_bytes(self, rows: int) -> int:
        """Shared memory besides: the warps' sums, and those a block has from the others."""
        return (self.warps * self.cluster + 1) * rows * self.block_n * 4 // self.cluster

    def registers(self, rows: int, K: int) -> int:
        """About what a thread has: weights, sums, and the rest."""
        return self.cols * (self.steps * 4 * (1 + self.many(K)) + rows) + _MORE_REGISTERS

    def invalid(self, rows: int, K: int) -> str | None:
        """Why it cannot be built for so many rows, or None."""
        if self.cols not in (1, 2, 4) or self.warps not in (4, 8, 16):
            return f"cols {self.cols} must be 1, 2 or 4, warps {self.warps} 4, 8 or 16"
        if rows * self.block_n % self.cluster:
            return f"{rows} rows of {self.block_n} outputs in {self.cluster} blocks"
        if self.registers(rows, K) > min(255, _REGISTERS // self.threads):
            return f"weights and sums of {self.cols} outputs and {rows} rows fill the registers"
        return _no_room(self.shared_bytes(rows, K))


@dataclass(frozen=True)
class HalfConfig:
    """Shape of the 16-bit kernel.

    Attributes:
        tiles: of 16 outputs, of a warp.
        wn, wk: warps side by side along the outputs, and along K.
        steps: pieces of 32 numbers along K that a warp has under way.
        cluster: blocks that share outputs and have a part of K each.
    """

    tiles: int
    wn: int
    wk: int
    steps: int
    cluster: int = 1

    @property
    def block_n(self) -> int:
        """Outputs of a cluster."""
        return self.wn * self.tiles * 16

    @property
    def threads(self) -> int:
        return self.wn * self.wk * 32

    @property
    def span(self) -> int:
        """K that a block takes at a time."""
        return self.wk * self.steps * 32

    def spans(self, K: int) -> int:
        """How many it takes."""
        return -(-K // (self.span * self.cluster))

    def shared_bytes(self, rows: int, K: int) -> int:
        """Dynamic shared memory: all of x or the warps' sums, and the blocks' sums."""
        x = rows * (self.spans(K) * self.span * 2 + 64)
        sums = self.wk * rows * (self.block_n + 4) * 4
        return max(x, sums) + (rows * self.block_n * 4 if self.cluster > 1 else 0)

    def static_bytes(self, rows: int) -> int:
        """Shared memory besides."""
        return 0

    def registers(self, rows: int, K: int) -> int:
        """About what a thread has: weights, sums, x, and the rest."""
        held = self.tiles * (self.steps * 8 + rows // 2 + 4) + rows // 2
        return held + _OTHER_REGISTERS

    def invalid(self, rows: int, K: int) -> str | None:
        """Why it cannot be built for so many rows, or None."""
        if self.threads % (self.block_n // 4):
            return f"{self.threads} threads do not divide by {self.block_n // 4} groups of outputs"
        granted = _REGISTERS // (-(-self.threads // 128) * 128)  # warps come in fours
        if self.registers(rows, K) > min(255, granted):
            return f"weights, sums and x of {self.tiles} tiles and {rows} rows fill the registers"
        return _no_room(self.shared_bytes(rows, K))


Config = SingleConfig | HalfConfig


_HALF = tuple(HalfConfig(*c) for c in product((1, 2), (1, 2, 4), (4, 8, 16), (2, 4), (1, 2, 4, 8)))
_SINGLE = tuple(SingleConfig(*c) for c in product((1, 2, 4), (4, 8, 16), (1, 2, 4), (1, 2, 4)))


def _no_room(size: int) -> str | None:
    fits = size <= _SHARED_LIMIT - 16_384  # some of the shared memory is static
    return None if fits else f"{size} bytes of shared memory"


def spread(
    blocks: int, needed: int, static: int, units: int, fetched: bool = False
) -> tuple[int, bool]:
    """Dynamic shared memory with which no multiprocessor takes more than its share of the blocks,
    and whether the launch is to leave L1 its room, which the share must fit beside.

    Blocks of an early launch come to lie where the launch before leaves room first, however much
    room there will be elsewhere a moment later.

    Args:
        blocks: of the launch.
        needed, static: dynamic and static shared memory of a block, in bytes.
        units: multiprocessors.
        fetched: whether L2 has all weights before the blocks begin. In 16 bits so few need no room
            in L1, and to divide a multiprocessor's memory anew costs an early launch 1.5 us.
    """
    share = -(-blocks // units)
    besides = static + _SHARED_OF_A_BLOCK
    pooled = not fetched and share * (needed + besides) <= _POOL
    there = _POOL if pooled else _SHARED_OF_A_UNIT
    return max(needed, there // (share + 1) - besides + 128 & -128), pooled


def padded_rows(M: int, dtype: torch.dtype) -> int:
    """Rows the kernel is compiled for: a power of two, 8 at least with the matrix units."""
    least = 2 if dtype.itemsize == 4 else 8
    return max(least, 1 << (M - 1).bit_length())


def reason_not(
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    x_strides: tuple[int, ...],
    w_strides: tuple[int, ...],
    capability: tuple[int, int] | None,
    needs_grad: bool = False,
    config: Config | None = None,
) -> str | None:
    """Why these kernels cannot serve the problem, or None. Pure: never touches CUDA.

    Args:
        M, K, N: x is (M, K), weight is (N, K).
        dtype: of x, weight and bias.
        x_strides, w_strides: element strides of the two matrices.
        capability: the device's compute capability; None without a CUDA device.
        needs_grad: whether the pre-activation may be asked for.
        config: the shape to be built; that of :func:`config_for` when None.
    """
    if capability is None:
        return "needs a CUDA device"
    if tuple(capability) != (9, 0):
        return f"needs compute capability 9.0 (Hopper), not {capability[0]}.{capability[1]}"
    if dtype not in DTYPES:
        return f"needs float32, bfloat16 or float16, not {dtype}"
    if needs_grad:
        return "inference only"
    if min(M, K, N) < 1:
        return "an empty dimension"
    most = _MOST_ROWS[dtype.itemsize]
    if most < M:
        return f"serves at most {most} rows of x in {dtype}, the call has {M}"
    if max(K, N) > _MAX_SIZE:
        return f"sizes must stay below 2^30, got K={K}, N={N}"
    piece = 16 // dtype.itemsize
    if K % piece or (dtype.itemsize == 2 and N % 8):
        return f"K = {K} must be a multiple of {piece}, and N = {N} of 8 in 16-bit dtypes"
    for name, rows, strides in (("x", M, x_strides), ("weight", N, w_strides)):
        row_stride, col_stride = strides
        apart = K <= row_stride <= _MAX_STRIDE and row_stride % piece == 0
        if not ((col_stride == 1 or K == 1) and (rows == 1 or apart)):
            return f"{name} has strides {tuple(strides)}: rows must be dense, 16-byte aligned"
    return (config or config_for(M, K, N, dtype)).invalid(padded_rows(M, dtype), K)


def candidates(M: int, K: int, dtype: torch.dtype) -> list[Config]:
    """Configurations that can be built for so many rows of x and have work for all their blocks."""
    rows = padded_rows(M, dtype)
    every: tuple[Config, ...] = _SINGLE if dtype.itemsize == 4 else _HALF
    busy = (c for c in every if (c.cluster - 1) * c.span < K)
    return [c for c in busy if c.invalid(rows, K) is None]


@lru_cache(maxsize=1024)
def config_for(M: int, K: int, N: int, dtype: torch.dtype) -> Config:
    """The configuration of the least ``microseconds`` for y (M, N) = x (M, K) @ weight (N, K)ᵀ; one
    that is ``invalid`` where none can be built."""
    least = SingleConfig(1, 4, 1, 4) if dtype.itemsize == 4 else HalfConfig(1, 1, 4, 2, 8)
    able = candidates(M, K, dtype) or [least]
    return min(able, key=lambda c: microseconds(c, M, K, N, dtype))


def microseconds(config: Config, M: int, K: int, N: int, dtype: torch.dtype) -> float:
    """About how long a launch takes on a Hopper, its weight being one of several that are read in
    turn."""
    return sum(map(mul, _US[dtype.itemsize], terms(config, M, K, N, dtype)))


def start_us(dtype: torch.dtype) -> float:
    """How much of ``microseconds`` every launch takes."""
    return _US[dtype.itemsize][0]


def terms(config: Config, M: int, K: int, N: int, dtype: torch.dtype) -> tuple[float, ...]:
    """What a launch takes time for, in the order of ``TERMS``; all but blocks and ``memory`` on the
    multiprocessor that has most blocks."""
    rows, size = padded_rows(M, dtype), dtype.itemsize
    across = config.wk if isinstance(config, HalfConfig) else config.warps
    outputs = config.block_n
    spans = -(-K // (config.span * config.cluster))
    depth, blocks = spans * config.span, -(-N // outputs) * config.cluster
    most = -(-blocks // _HOLD[config.cluster])
    at_once = min(most, _resident(config, rows, K))
    weight, mine = N * K * size, most * outputs * depth * size
    turn = max(weight, min(TURNS * weight, TURN_BYTES))
    out_of_memory = 1 - _L2_BYTES / max(turn, _L2_BYTES)
    return (
        1.0,
        float(config.cluster > 1),
        blocks / 1e3,
        spans * most / at_once,
        most * across * rows * outputs * 4 / 1e4,
        most * rows * depth * size / 1e5,
        most * outputs * depth * rows / 1e7,
        mine / 1e5 / min(_LOADERS, at_once * config.threads // 32),
        mine / 1e5 * out_of_memory,
        weight / _UNITS / 1e5 * out_of_memory,
    )


def _resident(config: Config, rows: int, K: int) -> int:
    """Blocks that a multiprocessor holds at once."""
    shared = config.shared_bytes(rows, K) + config.static_bytes(rows) + _SHARED_OF_A_BLOCK
    registers = config.threads * (-(-config.registers(rows, K) // 8) * 8)
    fit = _THREADS // config.threads, _REGISTERS // registers, _SHARED_OF_A_UNIT // shared
    return max(1, min(fit))
