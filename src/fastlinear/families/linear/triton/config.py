"""Launch configurations of the Triton backend: pure data and pure choices, no Triton import."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from fastlinear.activations.reference import NAMES
from fastlinear.families.linear.triton.gemm_config import UNITS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MAX_INT = 2**31 - 1


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


@dataclass(frozen=True)
class TilesConfig:
    """One way to launch the whole backward of any number of rows: programs for tiles of dx, for
    tiles of dW and for strips of db.

    Attributes:
        dx_m, dx_k, dx_n: rows and columns of a tile of dx, and rows of W at a time.
        dw_n, dw_k, dw_m: rows and columns of a tile of dW, and rows of x at a time.
        warps, stages: warps of a program, depth of the load pipeline.
        dpre_first: as in ``BackwardConfig``.
        chunks: how many times ``dx_n`` rows of W, or ``dw_m`` of x, are taken at a time. Matrix
            units truncate as they add up a chunk of float32, float32 additions across chunks round:
            the error grows with the chunk.
        only_aligned: whether it would spill registers with operands of other strides.
        rates: µs on an H200: of the launches, of a step (the chunks taken at a time) along N of
            one tile of dx, of one along M of one tile of dW, and of all such steps of dx, then of
            dW, over the multiprocessors.
    """

    dx_m: int
    dx_k: int
    dx_n: int
    dw_n: int
    dw_k: int
    dw_m: int
    warps: int = 4
    stages: int = 3
    dpre_first: bool = False
    chunks: int = 1
    only_aligned: bool = False
    rates: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def microseconds(self, M: int, K: int, N: int) -> float:
        """About what the backward takes on an H200: in bfloat16 the least is 3% from
        the best choice on average."""
        along_n = -(-N // (self.dx_n * self.chunks))
        along_m = -(-M // (self.dw_m * self.chunks))
        dx_steps = -(-M // self.dx_m) * -(-K // self.dx_k) * along_n
        dw_steps = -(-N // self.dw_n) * -(-K // self.dw_k) * along_m
        first, dx, dw, all_dx, all_dw = self.rates
        share = (all_dx * dx_steps + all_dw * dw_steps) / UNITS[90]
        return first + dx * along_n + dw * along_m + share


_TILES_16 = (
    TilesConfig(*(32, 32, 64, 32, 32, 64, 4, 4, False), rates=(1.41, 0.217, 0.349, 0.353, 0.0)),
    TilesConfig(
        *(64, 32, 128, 32, 64, 128, 4, 3, False),
        only_aligned=True,
        rates=(1.67, 0.420, 0.626, 0.0, 0.977),
    ),
    TilesConfig(*(64, 64, 64, 64, 64, 64, 4, 4, True), rates=(3.83, 0.160, 0.264, 0.299, 0.0)),
    TilesConfig(
        *(128, 128, 64, 128, 128, 64, 8, 3, True),
        only_aligned=True,
        rates=(4.78, 0.241, 0.361, 0.511, 0.0),
    ),
)
_TILES_32 = (
    TilesConfig(
        *(32, 32, 16, 32, 32, 16, 4, 3, False), chunks=2, rates=(1.37, 0.421, 0.504, 0.785, 0.0)
    ),
    TilesConfig(
        *(32, 32, 16, 32, 32, 16, 4, 3, True), chunks=2, rates=(2.69, 0.361, 0.572, 0.681, 0.0)
    ),
    TilesConfig(
        *(64, 32, 16, 32, 64, 16, 4, 3, True),
        chunks=4,
        only_aligned=True,
        rates=(3.19, 1.40, 0.874, 1.15, 0.0),
    ),
)
_CHEAP = ("none", "relu", "leaky_relu", "relu2", "sigmoid", "tanh")  # to form dpre of, often

ONE_TILE_ROWS = 128
"""Rows of x up to which one tile may hold them all in the whole backward."""


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


@lru_cache(maxsize=1024)
def backward_config_for(
    M: int, K: int, N: int, dtype: torch.dtype, activation: str, aligned: bool = True
) -> BackwardConfig | TilesConfig:
    """The configuration of the whole backward: all rows in one tile up to ONE_TILE_ROWS, where
    that is as fast as tiles of rows. ``aligned``: as for ``tiles_config_for``."""
    single = dtype.itemsize == 4
    fewest, largest = (64, 1 << 16) if single else (16, 1 << 18)
    if M > ONE_TILE_ROWS or (fewest < M and largest >= K * N):
        return tiles_config_for(M, K, N, dtype, activation, aligned)
    return few_rows_backward_config_for(M, K, N, dtype, activation)


def tiles_config_for(
    M: int, K: int, N: int, dtype: torch.dtype, activation: str, aligned: bool = True
) -> TilesConfig:
    """The fastest tiles by their rates.

    ``aligned``: whether K and N are multiples of 16 and every operand has one unit stride, the
    other one a multiple of 16: element-wise access takes registers that larger tiles need.
    """
    able = [
        c
        for c in (_TILES_32 if dtype.itemsize == 4 else _TILES_16)
        if (aligned or not c.only_aligned) and (c.dpre_first or activation in _CHEAP)
    ]
    return min(able, key=lambda c: c.microseconds(M, K, N))


def max_backward_rows(capability: tuple[int, int]) -> int:
    """Rows of x that the whole backward serves: without warpgroup products its tiles spill."""
    return _MAX_INT if capability >= (9, 0) else 32


def whole_backward_may_pay(M: int, K: int, N: int) -> bool:
    """Whether one launch for the whole backward is worth measuring."""
    return M <= ONE_TILE_ROWS or (M <= 4096 and K * N <= 1 << 22 and M * K * N <= 1 << 31)


@lru_cache(maxsize=1024)
def few_rows_backward_config_for(
    M: int, K: int, N: int, dtype: torch.dtype, activation: str
) -> BackwardConfig:
    """The configuration of the whole backward of M <= ONE_TILE_ROWS rows, all in one tile."""

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
