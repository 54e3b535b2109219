"""Triton kernels of ragged_linear: groups own consecutive rows, whose numbers are on the device.

Sizes are read as they are: below 0 counts as 0, and what passes the last row T is cut off. Rows
that no group owns belong to a group G without weights, whose results are 0. All products accumulate
in float32, deterministically.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.ops.common.activations_triton import activation, activation_grad
from fastlinear.ops.grouped_linear.triton_tiles import _dot


@triton.jit
def _bounds(sizes_ptr, T, G, BLOCK_G: tl.constexpr):
    """(begins, ends) of the rows of groups 0 to G, then of empty groups: int64, within [0, T]."""
    g = tl.arange(0, BLOCK_G)
    sizes = tl.load(sizes_ptr + g, mask=g < G, other=0).to(tl.int64)
    rows = tl.zeros((BLOCK_G,), dtype=tl.int64) + T
    sizes = tl.where(sizes < 0, 0, sizes)
    sizes = tl.where(sizes > rows, rows, sizes)
    sizes = tl.where(g == G, rows, sizes)
    ends = tl.cumsum(sizes, 0)
    begins = ends - sizes
    return tl.where(begins > rows, rows, begins), tl.where(ends > rows, rows, ends)


@triton.jit
def _ragged_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    saved_ptr,
    sizes_ptr,
    y_ptr,
    pre_ptr,
    T,
    G,
    col_tiles,
    x_row,
    w_group,
    w_row,
    w_col,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of y = act(x W_gᵀ + b_g), or of dx = (dy act'(pre)) W_g.

    x (T, K) has contiguous rows x_row apart; W is (G, N, K) by its strides; y and ``pre_ptr``
    (T, N) are dense. ``saved_ptr`` (T, K), dense, is given for dx, where x is dy: the activation is
    then its derivative. ``bias_ptr`` (G, N), ``saved_ptr`` and ``pre_ptr`` may be None. Tiles are
    numbered through groups 0 to G; programs past the last return.
    """
    tile = tl.program_id(0) // col_tiles
    n = (tl.program_id(0) % col_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    begins, ends = _bounds(sizes_ptr, T, G, BLOCK_G)
    tiles = (ends - begins + (BLOCK_M - 1)) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    index = tl.arange(0, BLOCK_G)
    g = tl.sum((last <= tile).to(tl.int32), 0)
    if g <= G:
        here = index == g
        before = tl.sum(tl.where(here, last - tiles, 0), 0)
        begin = tl.sum(tl.where(here, begins, 0), 0)
        end = tl.sum(tl.where(here, ends, 0), 0)
        rows = begin + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = rows < end
        owned = g < G
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + rows[:, None] * x_row + k[None, :]
        if saved_ptr is not None:
            s_ptrs = saved_ptr + rows[:, None] * K + k[None, :]
        w_base = w_ptr + g.to(tl.int64) * w_group
        w_ptrs = w_base + k[:, None].to(tl.int64) * w_col + n[None, :].to(tl.int64) * w_row
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin_k in range(0, tl.where(owned, K, 0), BLOCK_K):
            k_mask = k < K - begin_k
            x = tl.load(x_ptrs, mask=mask[:, None] & k_mask[None, :], other=0.0)
            if saved_ptr is not None:
                saved = tl.load(s_ptrs, mask=mask[:, None] & k_mask[None, :], other=0.0)
                grad = activation_grad(x.to(tl.float32), saved.to(tl.float32), ACTIVATION, MATH)
                x = grad.to(x_ptr.dtype.element_ty)
                s_ptrs += BLOCK_K
            w = tl.load(w_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
            acc = _dot(x, w, acc, PRECISION, UPCAST)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * w_col
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + g.to(tl.int64) * N + n
            acc += tl.load(bias_ptrs, mask=n_mask & owned, other=0.0).to(tl.float32)[None, :]
        offs = rows[:, None] * N + n[None, :]
        out_mask = mask[:, None] & n_mask[None, :]
        if pre_ptr is not None:
            tl.store(pre_ptr + offs, acc.to(pre_ptr.dtype.element_ty), mask=out_mask)
        if saved_ptr is None:
            acc = tl.where(owned, activation(acc, ACTIVATION, MATH), 0.0)
        tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _ragged_weight_kernel(
    dy_ptr,
    saved_ptr,
    x_ptr,
    sizes_ptr,
    dw_ptr,
    db_ptr,
    T,
    G,
    col_tiles,
    dy_row,
    x_row,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile (BLOCK_N, BLOCK_K) of dW_g = dpreᵀ x over a group's rows, and BLOCK_N of db_g.

    dy (T, N) and x (T, K) have contiguous rows dy_row and x_row apart; ``saved_ptr`` (T, N), dw
    (G, N, K) and db (G, N) are dense. ``saved_ptr`` is None for "none"; ``dw_ptr`` and ``db_ptr``
    where not wanted. Groups without rows get exact zeros.
    """
    n = (tl.program_id(0) // col_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (tl.program_id(0) % col_tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
    g = tl.program_id(1)
    n_mask = n < N
    k_mask = k < K
    begins, ends = _bounds(sizes_ptr, T, G, BLOCK_G)
    here = tl.arange(0, BLOCK_G) == g
    begin = tl.sum(tl.where(here, begins, 0), 0)
    end = tl.sum(tl.where(here, ends, 0), 0)
    dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in range(begin, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        mask = rows < end
        d_mask = mask[:, None] & n_mask[None, :]
        d = tl.load(dy_ptr + rows[:, None] * dy_row + n[None, :], mask=d_mask, other=0.0)
        if saved_ptr is not None:
            saved = tl.load(saved_ptr + rows[:, None] * N + n[None, :], mask=d_mask, other=0.0)
            grad = activation_grad(d.to(tl.float32), saved.to(tl.float32), ACTIVATION, MATH)
            d = tl.where(d_mask, grad, 0.0).to(dy_ptr.dtype.element_ty)
        if db_ptr is not None:
            db += tl.sum(d.to(tl.float32), 0)
        if dw_ptr is not None:
            x_ptrs = x_ptr + rows[:, None] * x_row + k[None, :]
            x = tl.load(x_ptrs, mask=mask[:, None] & k_mask[None, :], other=0.0)
            dw = _dot(tl.trans(d), x, dw, PRECISION, UPCAST)
    part = g.to(tl.int64) * N
    if dw_ptr is not None:
        ptrs = dw_ptr + (part + n[:, None]) * K + k[None, :]
        tl.store(ptrs, dw.to(dw_ptr.dtype.element_ty), mask=n_mask[:, None] & k_mask[None, :])
    if db_ptr is not None:  # noqa: SIM102 - known when compiling, the next is not
        if tl.program_id(0) % col_tiles == 0:
            tl.store(db_ptr + part + n, db.to(db_ptr.dtype.element_ty), mask=n_mask)
