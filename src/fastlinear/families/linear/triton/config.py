"""Launch configurations of the Triton backend: pure data and pure choices, no Triton import."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from fastlinear.activations.reference import NAMES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MAX_INT = 2**31 - 1
_LONGEST_CHAIN = 32  # float32 additions of a thread one after the other: each rounds


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


ONE_TILE_ROWS = 128
"""Rows of x up to which one tile may hold them all in the whole backward."""
TF32X3_MIN_DEPTH = 128
"""Depth of a float32 product of few rows from which three TF32 products are as exact as torch's."""
_MANY_MIN_DEPTH = 96
_FEW_ROWS = 128
TF32X3_MIN_ROWS = 32
"""Of x, from which they are as exact as torch's own dW."""


def dot_precision(depth: int, rows: int = 1, cols: int = 1) -> str:
    """Scheme of a float32 product (16-bit ones ignore it), whatever precision the user allows.

    Three TF32 products: on an H200 their error stays near 1.3e-7, while that of torch's own float32
    product grows with the depth: 5.9e-8 at 16, 1.45e-7 at 64, 1.8e-7 at 96 (where all numbers are
    positive 1.15e-7 and 1.47e-7); it is less for few rows. Short products take plain float32
    arithmetic, two to three times as long. A single TF32 product is not offered: Triton truncates
    the operands, which costs more than twice the error of cuBLAS's rounded ones (5.8e-4 against
    2.2e-4).

    Args:
        rows, cols: of the product; where they are not told, few.
    """
    many = min(rows, cols) > _FEW_ROWS
    return "tf32x3" if depth >= (_MANY_MIN_DEPTH if many else TF32X3_MIN_DEPTH) else "ieee"


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
    width = 32 * vector * warps
    while dtype.itemsize == 4 and width < min(2048, K // _LONGEST_CHAIN):
        warps, width = min(8, 2 * warps), 2 * width
    block_n = 4 if M == 1 and dtype.itemsize == 2 and N >= 2048 else 2
    return FewRowsConfig(block_n, width, warps)


def max_backward_rows(capability: tuple[int, int]) -> int:
    """Rows of x that the whole backward serves: without warpgroup products its tiles spill."""
    return _MAX_INT if capability >= (9, 0) else 32


def whole_backward_may_pay(M: int, K: int, N: int) -> bool:
    """Whether one launch for the whole backward is worth measuring."""
    return M <= ONE_TILE_ROWS or (M <= 4096 and K * N <= 1 << 22 and M * K * N <= 1 << 31)


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
