"""Which calls the CUDA kernels of few rows serve, and in which shape: pure data, pure choices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

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
_REGISTERS, _OTHER_REGISTERS = 65_536, 24
_MOST_BLOCKS = 8  # of a cluster, on any Hopper


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

    def invalid(self, rows: int, K: int) -> str | None:
        """Why it cannot be built for so many rows, or None."""
        if self.cols not in (1, 2, 4) or self.warps not in (4, 8, 16):
            return f"cols {self.cols} must be 1, 2 or 4, warps {self.warps} 4, 8 or 16"
        if rows * self.block_n % self.cluster:
            return f"{rows} rows of {self.block_n} outputs in {self.cluster} blocks"
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

    def invalid(self, rows: int, K: int) -> str | None:
        """Why it cannot be built for so many rows, or None."""
        if self.threads % (self.block_n // 4):
            return f"{self.threads} threads do not divide by {self.block_n // 4} groups of outputs"
        held = self.tiles * self.steps * 8 + self.tiles * rows // 2 + rows // 2
        granted = _REGISTERS // (-(-self.threads // 128) * 128)  # warps come in fours
        if held + _OTHER_REGISTERS + 4 * self.tiles > min(255, granted):
            return f"weights, sums and x of {self.tiles} tiles and {rows} rows fill the registers"
        return _no_room(self.shared_bytes(rows, K))


Config = SingleConfig | HalfConfig


# Measured on an H200 at K = N, L2 warm: padded rows → features → configuration.
_SINGLE = {
    2: {
        128: SingleConfig(1, 4, 1),
        256: SingleConfig(1, 8, 1),
        512: SingleConfig(1, 8, 2),
        1024: SingleConfig(2, 16, 2),
        2048: SingleConfig(4, 16, 1),
        4096: SingleConfig(4, 8, 2),
    },
    4: {
        128: SingleConfig(1, 4, 1),
        256: SingleConfig(1, 8, 1),
        512: SingleConfig(2, 4, 4),
        1024: SingleConfig(4, 16, 2),
        2048: SingleConfig(4, 16, 1),
        4096: SingleConfig(4, 8, 2),
    },
    8: {
        128: SingleConfig(1, 4, 1),
        256: SingleConfig(2, 4, 2),
        512: SingleConfig(2, 4, 4),
        1024: SingleConfig(2, 16, 1),
        2048: SingleConfig(4, 8, 2),
        4096: SingleConfig(4, 4, 4),
    },
    16: {
        128: SingleConfig(1, 4, 1),
        256: SingleConfig(2, 4, 2),
        512: SingleConfig(2, 4, 4),
        1024: SingleConfig(2, 8, 2),
        2048: SingleConfig(4, 8, 2),
        4096: SingleConfig(4, 4, 4),
    },
}
# Padded rows and shape → what is taken where K is more than a span: the same span without stack.
_LONG = {(2, SingleConfig(2, 16, 2)): SingleConfig(2, 8, 4)}
# The same with weights out of memory: most rows → (K, N) → configuration.
_HALF: dict[int, dict[tuple[int, int], HalfConfig]] = {
    2: {
        (512, 512): HalfConfig(2, 2, 8, 2),
        (1024, 1024): HalfConfig(1, 1, 8, 4),
        (1024, 4096): HalfConfig(1, 1, 8, 2),
        (1024, 11008): HalfConfig(1, 2, 8, 4),
        (2048, 1024): HalfConfig(1, 1, 16, 4),
        (2048, 2048): HalfConfig(1, 1, 16, 2),
        (2048, 8192): HalfConfig(1, 2, 8, 4),
        (4096, 1024): HalfConfig(1, 1, 16, 2, 2),
        (4096, 2048): HalfConfig(1, 1, 16, 4),
        (4096, 4096): HalfConfig(1, 1, 16, 4),
        (4096, 11008): HalfConfig(2, 2, 8, 4),
        (5120, 2048): HalfConfig(1, 1, 16, 4),
        (8192, 2048): HalfConfig(1, 1, 16, 4),
        (8192, 8192): HalfConfig(2, 1, 16, 4),
        (11008, 4096): HalfConfig(2, 2, 4, 4, 2),
        (14336, 4096): HalfConfig(2, 2, 8, 2, 2),
        (24576, 3072): HalfConfig(2, 2, 8, 4, 4),
        (28672, 8192): HalfConfig(2, 2, 8, 2, 4),
    },
    8: {
        (512, 512): HalfConfig(2, 2, 8, 2),
        (1024, 1024): HalfConfig(1, 1, 16, 2),
        (1024, 4096): HalfConfig(1, 2, 8, 2),
        (1024, 11008): HalfConfig(1, 4, 4, 4),
        (2048, 1024): HalfConfig(1, 1, 16, 2),
        (2048, 2048): HalfConfig(1, 1, 16, 2),
        (2048, 8192): HalfConfig(1, 4, 4, 2, 2),
        (4096, 1024): HalfConfig(1, 1, 16, 2, 2),
        (4096, 2048): HalfConfig(1, 2, 8, 4, 2),
        (4096, 4096): HalfConfig(1, 4, 4, 4, 2),
        (4096, 11008): HalfConfig(1, 4, 4, 2, 4),
        (5120, 2048): HalfConfig(1, 2, 8, 4, 2),
        (8192, 2048): HalfConfig(2, 1, 16, 2, 2),
        (8192, 8192): HalfConfig(2, 2, 4, 4, 8),
        (11008, 4096): HalfConfig(2, 2, 8, 2, 2),
        (14336, 4096): HalfConfig(2, 1, 16, 2, 2),
        (24576, 3072): HalfConfig(2, 1, 8, 4, 8),
        (28672, 8192): HalfConfig(2, 2, 4, 4, 8),
    },
    16: {
        (512, 512): HalfConfig(2, 2, 8, 2),
        (1024, 1024): HalfConfig(1, 1, 8, 2),
        (1024, 4096): HalfConfig(1, 2, 8, 2),
        (1024, 11008): HalfConfig(2, 2, 4, 2, 2),
        (2048, 1024): HalfConfig(1, 1, 8, 2, 2),
        (2048, 2048): HalfConfig(1, 2, 8, 2, 2),
        (2048, 8192): HalfConfig(2, 2, 4, 4),
        (4096, 1024): HalfConfig(1, 4, 4, 4, 4),
        (4096, 2048): HalfConfig(2, 1, 8, 4, 2),
        (4096, 4096): HalfConfig(2, 2, 4, 4, 2),
        (4096, 11008): HalfConfig(2, 2, 4, 4, 4),
        (5120, 2048): HalfConfig(1, 2, 8, 2, 2),
        (8192, 2048): HalfConfig(1, 2, 8, 4, 2),
        (8192, 8192): HalfConfig(1, 4, 4, 4, 2),
        (11008, 4096): HalfConfig(1, 4, 4, 4, 2),
        (14336, 4096): HalfConfig(2, 1, 8, 4, 8),
        (24576, 3072): HalfConfig(1, 4, 4, 4, 8),
        (28672, 8192): HalfConfig(1, 4, 4, 4, 8),
    },
    32: {
        (512, 512): HalfConfig(2, 1, 8, 4),
        (1024, 1024): HalfConfig(1, 1, 8, 2),
        (1024, 4096): HalfConfig(2, 1, 8, 2),
        (1024, 11008): HalfConfig(2, 2, 4, 2),
        (2048, 1024): HalfConfig(1, 1, 8, 2, 2),
        (2048, 2048): HalfConfig(2, 1, 8, 2, 2),
        (2048, 8192): HalfConfig(1, 4, 4, 4),
        (4096, 1024): HalfConfig(2, 2, 4, 2, 8),
        (4096, 2048): HalfConfig(1, 2, 8, 4, 2),
        (4096, 4096): HalfConfig(1, 4, 4, 4, 2),
        (4096, 11008): HalfConfig(2, 2, 4, 2, 4),
        (5120, 2048): HalfConfig(2, 1, 8, 2, 2),
        (8192, 2048): HalfConfig(2, 2, 4, 2, 8),
        (8192, 8192): HalfConfig(2, 2, 4, 2, 8),
        (11008, 4096): HalfConfig(2, 2, 4, 4, 8),
        (14336, 4096): HalfConfig(1, 4, 4, 4, 8),
        (24576, 3072): HalfConfig(1, 4, 4, 4, 8),
    },
    64: {
        (512, 512): HalfConfig(2, 1, 8, 4),
        (1024, 1024): HalfConfig(1, 1, 8, 2),
        (1024, 4096): HalfConfig(1, 2, 8, 2),
        (2048, 2048): HalfConfig(1, 2, 4, 4, 2),
        (2048, 8192): HalfConfig(2, 2, 4, 4, 2),
        (4096, 1024): HalfConfig(2, 2, 4, 4, 4),
        (4096, 4096): HalfConfig(2, 2, 4, 4, 4),
        (4096, 11008): HalfConfig(2, 2, 4, 4, 4),
        (5120, 2048): HalfConfig(2, 2, 4, 2, 8),
        (8192, 2048): HalfConfig(2, 2, 4, 4, 8),
        (8192, 8192): HalfConfig(2, 2, 4, 4, 8),
        (11008, 4096): HalfConfig(1, 2, 4, 4, 8),
    },
}


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


def _measured(M: int, K: int, N: int, dtype: torch.dtype) -> Config:
    """What was measured nearest: by the size of the weight, in 16-bit dtypes by K and, as blocks
    follow from it, by N twice as much."""
    rows = padded_rows(M, dtype)
    if dtype.itemsize == 4:
        known, size = _SINGLE[rows], math.log2(K * N) / 2
        return known[min(known, key=lambda features: abs(math.log2(features) - size))]
    shapes = _HALF[2 if M <= 2 else rows]
    return shapes[
        min(shapes, key=lambda s: abs(math.log2(K / s[0])) + 2 * abs(math.log2(N / s[1])))
    ]


@lru_cache(maxsize=1024)
def config_for(M: int, K: int, N: int, dtype: torch.dtype) -> Config:
    """The configuration for y (M, N) = x (M, K) @ weight (N, K)ᵀ: the measured one that is nearest,
    with as many blocks more as x needs for its shared memory (which was not measured), and without
    blocks that K has no work for."""
    rows = padded_rows(M, dtype)
    config = _measured(M, K, N, dtype)
    if isinstance(config, SingleConfig) and config.many(K):
        config = _LONG.get((rows, config), config)
    while config.cluster < _MOST_BLOCKS and _no_room(config.shared_bytes(rows, K)):
        config = replace(config, cluster=config.cluster * 2)
    while config.cluster > 1 and (config.cluster - 1) * config.span >= K:
        config = replace(config, cluster=config.cluster // 2)
    return config
