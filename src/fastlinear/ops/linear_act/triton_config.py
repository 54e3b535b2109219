"""Launch configurations of the Triton backend: pure data and pure choices, no Triton import."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.linear_act.triton_gemm_config import UNITS, GemmConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_TMA_MIN_WORK = 1 << 28  # M*N*K from which persistent TMA pays for its dearer launch
_MAX_INT = 2**31 - 1

# Rates behind the choice of splits; only their ratios matter (H200, bfloat16).
_FLOPS_PER_SECOND = 6e14
_BYTES_PER_SECOND = 3.5e12
_LAUNCH_SECONDS = 3e-6


# Candidates from the largest tile down, measured on an H200 (M 16 to 8192, 1024 to 4096 features).
_TMA_16 = (
    GemmConfig("tma", 128, 128, 64, 4, 5, subtile=2),
    GemmConfig("tma", 64, 128, 64, 4, 5),
)
_POINTER_16 = (
    GemmConfig("pointer", 128, 128, 64, 8, 3),
    GemmConfig("pointer", 64, 128, 64, 8, 3),
    GemmConfig("pointer", 64, 64, 64, 4, 4),
    GemmConfig("pointer", 64, 32, 128, 4, 4),
    GemmConfig("pointer", 32, 32, 128, 4, 4),
    GemmConfig("pointer", 16, 32, 256, 4, 3),
)
# Two programs a multiprocessor: one multiplies while the other is in its epilogue.
_PERSISTENT = GemmConfig("tma", 128, 128, 64, 4, 3, subtile=2, programs_per_unit=2)


@dataclass(frozen=True)
class FewRowsConfig:
    """One way to launch the forward of few rows: each program takes ``block_n`` outputs, and its
    threads ``block_k`` inputs at a time."""

    block_n: int
    block_k: int
    warps: int


@dataclass(frozen=True)
class BackwardConfig:
    """One way to launch the whole backward of few rows of x.

    Attributes:
        kind: ``"fma"`` (float32 multiply-adds, one program a strip of columns of W) or ``"dot"``
            (matrix units, programs of their own for dx and for dW).
        dx_k, dx_n: columns of K of a program, and rows of N at a time.
        dw_k, dw_n: tile of dW (dot only).
        warps, stages: warps of a program, depth of the load pipeline.
        slices: slices of N, whose shares of dx a second kernel sums in a fixed order.
        dpre_first: whether a launch of its own forms dpre, where the derivative costs more than it
            saves to form it again for each strip of dx.
    """

    kind: str
    dx_k: int
    dx_n: int
    dw_k: int = 64
    dw_n: int = 64
    warps: int = 4
    stages: int = 3
    slices: int = 1
    dpre_first: bool = False

    def block_m(self, M: int) -> int:
        """Rows of the one tile that holds all M."""
        return max(16, 1 << (M - 1).bit_length())


MAX_BACKWARD_ROWS = 128
FAST_TF32 = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Capabilities whose TF32 rate is many times their float32 rate."""


@lru_cache(maxsize=1024)
def few_rows_config_for(M: int, K: int, N: int, dtype: torch.dtype) -> FewRowsConfig | None:
    """Configuration of the forward of M rows by multiply-adds; None where tiles are better."""
    most = 4 if dtype.itemsize == 4 else 2
    if most < M:
        return None
    warps = 2 if M == 2 or (M == 1 and dtype.itemsize == 4) else 4
    vector = 16 // dtype.itemsize
    while warps > 1 and 32 * vector * warps > K:
        warps //= 2
    block_n = 4 if M == 1 and dtype.itemsize == 2 and N >= 2048 else 2
    return FewRowsConfig(block_n, 32 * vector * warps, warps)


def max_backward_rows(capability: tuple[int, int]) -> int:
    """Rows of x that the whole backward serves: without warpgroup products larger tiles spill."""
    return MAX_BACKWARD_ROWS if capability >= (9, 0) else 32


@lru_cache(maxsize=1024)
def backward_config_for(
    M: int, K: int, N: int, dtype: torch.dtype, activation: str
) -> BackwardConfig:
    """The configuration of the whole backward of M <= MAX_BACKWARD_ROWS rows."""

    def slices(block_k: int, programs: int) -> int:
        """Slices of at least 128 rows of W, for about that many programs of dx."""
        return max(1, min(8, programs * block_k // K, N // 128))

    if dtype.itemsize == 4:
        if M == 1:
            return BackwardConfig("fma", 32, 128, warps=8, stages=1, slices=slices(32, 512))
        if M <= 4:
            return BackwardConfig("fma", 16, 128, warps=4, stages=3, slices=slices(16, 1024))
        if M < 32:
            return BackwardConfig("dot", 32, 32, 32, 32, 4, 3, slices(32, 256))
        warps, stages = (4, 3) if M <= 64 else (8, 2)
        return BackwardConfig("dot", 32, 32, 64, 64, warps, stages, slices(32, 128), True)
    if M <= 16:
        return BackwardConfig("dot", 32, 128, 128, 64, 4, 3, slices(32, 256))
    if M > 64:
        return BackwardConfig("dot", 32, 64, 64, 64, 4, 3, slices(32, 64), True)
    if activation == "none" and N <= 1536:
        return BackwardConfig("dot", 16, 128, 64, 64, 4, 3)
    # Each slice forms its own part of dpre, so that none is formed often.
    return BackwardConfig("dot", 64, 128, 64, 64, 4, 2, slices(64, 256))


@lru_cache(maxsize=1024)
def config_for(
    M: int, K: int, N: int, dtype: torch.dtype, capability: tuple[int, int], aligned: bool = True
) -> GemmConfig:
    """The configuration of the forward (M, K) x (K, N) in 16 bits.

    The largest tile that still gives most multiprocessors one. ``aligned``: whether both operands
    and the result have one unit stride and the other a multiple of 16 bytes; element-wise access to
    others takes so many registers that larger tiles would spill.
    """
    arch = capability[0] * 10 + capability[1]
    units = UNITS.get(arch, 108)
    candidates = (*(_TMA_16 if M * N * K >= _TMA_MIN_WORK else ()), *_POINTER_16)
    runnable = [c for c in candidates if c.problem(dtype, capability) is None]
    if not aligned:
        runnable = [c for c in runnable if c.kind == "pointer" and c.block_c <= 64]
    fitting = [c for c in runnable if c.block_r < 2 * M] or runnable[-1:]
    for config in fitting:
        tiles = -(-M // config.block_r) * -(-N // config.block_c)
        if 4 * tiles >= 3 * units:
            persists = config.kind == "tma" and tiles > units and config.block_r == 128
            return _PERSISTENT if persists else config
    return fitting[-1]


@lru_cache(maxsize=1024)
def grad_config_for(
    rows: int, cols: int, depth: int, dtype: torch.dtype, capability: tuple[int, int], aligned: bool
) -> GemmConfig:
    """Configuration of a backward product (rows, depth) x (depth, cols) in 16 bits.

    DEPTH is split when the gain in balance pays for the float32 workspace of the slices.
    """
    whole = config_for(rows, depth, cols, dtype, capability, aligned)
    split = whole if whole.kind == "pointer" else GemmConfig("tma", 128, 256, 64, 8, 3, subtile=2)
    units = UNITS.get(capability[0] * 10 + capability[1], 108)
    product = 2.0 * rows * cols * depth / _FLOPS_PER_SECOND
    slice_time = 8.0 * rows * cols / _BYTES_PER_SECOND  # a float32 slice is written, then read

    def seconds(config: GemmConfig) -> float:
        tiles = -(-rows // config.block_r) * -(-cols // config.block_c) * config.splits
        waves = tiles / (units * config.programs_per_unit)
        extra = _LAUNCH_SECONDS + slice_time * config.splits if config.splits > 1 else 0.0
        return product * math.ceil(waves) / waves + extra

    most = max(1, min(16, depth // (8 * split.block_d)))
    return min((whole, *(replace(split, splits=s) for s in range(2, most + 1))), key=seconds)


def reason_not(
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    activation: str,
    x_strides: tuple[int, ...],
    w_strides: tuple[int, ...],
    capability: tuple[int, int],
) -> str | None:
    """Why the Triton backend cannot serve a linear_act call, or None when it can.

    Args:
        M, K, N: x is (M, K), weight (N, K).
        dtype: of x, weight and bias.
        activation: name of the activation.
        x_strides, w_strides: strides in elements; any non-negative ones are served.
        capability: CUDA compute capability of the device.
    """
    if capability < (8, 0):
        return f"needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    if dtype not in DTYPES:
        return f"serves float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if activation not in NAMES:
        return f"does not know the activation {activation!r}"
    if max(M, K, N) > _MAX_INT // 2:
        return f"sizes must stay below 2^30, got M={M}, K={K}, N={N}"
    if any(not 0 <= s <= _MAX_INT for s in (*x_strides, *w_strides)):
        return f"strides must be 0 to 2^31 - 1, got {x_strides} and {w_strides}"
    return None
