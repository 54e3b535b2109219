"""Triton kernels of ragged_linear: groups own consecutive rows, whose numbers are on the device.

Sizes are read as they are: below 0 counts as 0, and what passes the last row T is cut off. Rows
that no group owns belong to a group G without weights, whose results are 0. Every program finds its
own group among the sizes, BLOCK_G of BLOCKS at a time. All products accumulate in float32,
deterministically.

Where TMA, matrices are descriptors: tiles come through the copy engine, rows of other groups in
them are computed and left out, and what is beyond a matrix is 0. Else rows beyond a group's are
read as its last one, and left out as well: no load needs a mask where sizes are whole tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation, activation_grad
from fastlinear.families.grouped.triton.tiles import _dot


@triton.jit
def _bounds(sizes_ptr, first, before, T, G, BLOCK_G: tl.constexpr):
    """(begins, ends, before) of BLOCK_G groups from ``first`` on; those past group G are empty.

    Begins and ends of rows are int32, within [0, T]; ``before`` (1,) int64 is how many rows the
    groups before ``first`` have, and then those before the next.
    """
    g = first + tl.arange(0, BLOCK_G)
    sizes = tl.load(sizes_ptr + g, mask=g < G, other=0).to(tl.int64)
    rows = tl.zeros((BLOCK_G,), dtype=tl.int64) + T
    sizes = tl.where(sizes < 0, 0, sizes)
    sizes = tl.where(sizes > rows, rows, sizes)
    sizes = tl.where(g == G, rows, sizes)
    ends = before + tl.cumsum(sizes, 0)
    begins = ends - sizes
    begins = tl.where(begins > rows, rows, begins)
    ends = tl.where(ends > rows, rows, ends)
    return begins.to(tl.int32), ends.to(tl.int32), before + tl.sum(sizes, 0)


@triton.jit
def _derived(d, saved, ACTIVATION: tl.constexpr, MATH: tl.constexpr):
    """dy act'(pre), in dy's dtype."""
    return activation_grad(d.to(tl.float32), saved.to(tl.float32), ACTIVATION, MATH).to(d.dtype)


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
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HIGH: tl.constexpr,
    TMA: tl.constexpr,
    TURNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of y = act(x W_gᵀ + b_g), or of dx = (dy act'(pre)) W_g.

    x (T, K) has contiguous rows x_row apart; W is (G, N, K) by its strides; y and ``pre_ptr``
    (T, N) are dense. ``saved_ptr`` (T, K), dense, is given for dx, where x is dy: the activation is
    then its derivative. ``bias_ptr`` (G, N), ``saved_ptr`` and ``pre_ptr`` may be None. Where TMA,
    W is a dense (G·N, K), or (G·K, N) where TURNED, and K a multiple of BLOCK_K.

    Tiles are numbered through groups 0 to G, in each through HIGH of its rows' tiles, then its
    columns', so that a weight is read once for HIGH tiles; programs past the last return.
    """
    tile = tl.program_id(0)
    before = tl.zeros((1,), dtype=tl.int64)
    g, begin, end, passed, done = 0, 0, 0, 0, 0
    for block in range(0, BLOCKS):
        begins, ends, before = _bounds(sizes_ptr, block * BLOCK_G, before, T, G, BLOCK_G)
        row_tiles = (ends - begins + (BLOCK_M - 1)) // BLOCK_M
        last = done + tl.cumsum(row_tiles, 0) * col_tiles
        own = last - row_tiles * col_tiles
        here = (own <= tile) & (tile < last)
        g += tl.sum((last <= tile).to(tl.int32), 0)
        begin += tl.sum(tl.where(here, begins, 0), 0)
        end += tl.sum(tl.where(here, ends, 0), 0)
        passed += tl.sum(tl.where(here, own, 0), 0)
        done += tl.sum(row_tiles, 0) * col_tiles
    if g <= G:
        tile -= passed
        first = tile // (HIGH * col_tiles) * HIGH
        high = tl.minimum((end - begin + (BLOCK_M - 1)) // BLOCK_M - first, HIGH)
        tile = tile % (HIGH * col_tiles)
        row0 = begin + (first + tile % high) * BLOCK_M
        n0 = tile // high * BLOCK_N
        rows = row0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        mask = rows < end
        n_mask = n < N
        owned = g < G
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if TMA:
            for k in range(0, tl.where(owned, K, 0), BLOCK_K):
                x = x_ptr.load([row0, k])
                if saved_ptr is not None:
                    saved = saved_ptr.load([row0, k])
                    x = _derived(x, saved, ACTIVATION, MATH)
                if TURNED:
                    w = w_ptr.load([g * K + k, n0])
                else:
                    w = w_ptr.load([g * N + n0, k]).T
                acc = _dot(x, w, acc, PRECISION, UPCAST)
        else:
            k = tl.arange(0, BLOCK_K)
            near = tl.minimum(rows, end - 1).to(tl.int64)
            x_ptrs = x_ptr + near[:, None] * x_row + k[None, :]
            if saved_ptr is not None:
                s_ptrs = saved_ptr + near[:, None] * K + k[None, :]
            w_base = w_ptr + g.to(tl.int64) * w_group
            w_ptrs = w_base + k[:, None].to(tl.int64) * w_col + n[None, :].to(tl.int64) * w_row
            for begin_k in range(0, tl.where(owned, K, 0), BLOCK_K):
                k_mask = k < K - begin_k
                if K % BLOCK_K == 0:
                    x = tl.load(x_ptrs)
                else:
                    x = tl.load(x_ptrs, mask=k_mask[None, :], other=0.0)
                if saved_ptr is not None:
                    if K % BLOCK_K == 0:
                        saved = tl.load(s_ptrs)
                    else:
                        saved = tl.load(s_ptrs, mask=k_mask[None, :], other=0.0)
                    x = _derived(x, saved, ACTIVATION, MATH)
                    s_ptrs += BLOCK_K
                if K % BLOCK_K == 0 and N % BLOCK_N == 0:
                    w = tl.load(w_ptrs)
                else:
                    w = tl.load(w_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
                acc = _dot(x, w, acc, PRECISION, UPCAST)
                x_ptrs += BLOCK_K
                w_ptrs += BLOCK_K * w_col
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + g.to(tl.int64) * N + n
            acc += tl.load(bias_ptrs, mask=n_mask & owned, other=0.0).to(tl.float32)[None, :]
        offs = rows[:, None].to(tl.int64) * N + n[None, :]
        out_mask = mask[:, None] & n_mask[None, :]
        if pre_ptr is not None:
            tl.store(pre_ptr + offs, acc.to(pre_ptr.dtype.element_ty), mask=out_mask)
        if saved_ptr is None:
            acc = tl.where(owned, activation(acc, ACTIVATION, MATH), 0.0)
        tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _rows_of(
    ptr, row, first, stride, col0, col, COLS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """A tile of rows that all belong to the group; 0 in columns from COLS on, of which there are
    none where EVEN."""
    if TMA:
        return ptr.load([first, col0])
    else:  # noqa: RET505 - Triton goes on compiling after a taken compile-time branch
        ptrs = ptr + row[:, None].to(tl.int64) * stride + col[None, :]
        if EVEN:
            return tl.load(ptrs)
        else:  # noqa: RET505
            return tl.load(ptrs, mask=(col < COLS)[None, :], other=0.0)


@triton.jit
def _weight_tile(
    dy_ptr,
    saved_ptr,
    x_ptr,
    begin,
    end,
    dy_row,
    x_row,
    n0,
    k0,
    n,
    k,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dpreᵀ x of rows ``begin`` to ``end``, (BLOCK_N, BLOCK_K) float32."""
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    whole = begin + (end - begin) // BLOCK_M * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for first in range(begin, whole, BLOCK_M):
        d = _rows_of(dy_ptr, first + m, first, dy_row, n0, n, N, EVEN_N, TMA)
        if saved_ptr is not None:
            saved = _rows_of(saved_ptr, first + m, first, N, n0, n, N, EVEN_N, TMA)
            d = _derived(d, saved, ACTIVATION, MATH)
        x = _rows_of(x_ptr, first + m, first, x_row, k0, k, K, EVEN_K, TMA)
        dw = _dot(tl.trans(d), x, dw, PRECISION, UPCAST)
    if whole < end:
        rows = tl.minimum(whole + m, end - 1)
        mask = (whole + m < end)[:, None]
        d = _rows_of(dy_ptr, rows, whole, dy_row, n0, n, N, EVEN_N, TMA)
        if saved_ptr is not None:
            saved = _rows_of(saved_ptr, rows, whole, N, n0, n, N, EVEN_N, TMA)
            d = _derived(d, saved, ACTIVATION, MATH)
        x = _rows_of(x_ptr, rows, whole, x_row, k0, k, K, EVEN_K, TMA)
        d, x = tl.where(mask, d, 0.0).to(d.dtype), tl.where(mask, x, 0.0).to(x.dtype)
        dw = _dot(tl.trans(d), x, dw, PRECISION, UPCAST)
    return dw


@triton.jit
def _bias_sums(
    dy_ptr,
    saved_ptr,
    begin,
    end,
    dy_row,
    n0,
    n,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
):
    """Sums of dpre over rows ``begin`` to ``end``, (BLOCK_N,) float32."""
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    m = tl.arange(0, BLOCK_M)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in range(begin, end, BLOCK_M):
        rows = tl.minimum(first + m, end - 1)
        d = _rows_of(dy_ptr, rows, first, dy_row, n0, n, N, EVEN_N, TMA)
        if saved_ptr is not None:
            saved = _rows_of(saved_ptr, rows, first, N, n0, n, N, EVEN_N, TMA)
            d = _derived(d, saved, ACTIVATION, MATH)
        db += tl.sum(tl.where((first + m < end)[:, None], d.to(tl.float32), 0.0), 0)
    return db


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
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile (BLOCK_N, BLOCK_K) of dW_g = dpreᵀ x over a group's rows, or BLOCK_N of db_g.

    dy (T, N) and x (T, K) have contiguous rows dy_row and x_row apart; ``saved_ptr`` (T, N), dw
    (G, N, K) and db (G, N) are dense. ``saved_ptr`` is None for "none"; ``dw_ptr`` and ``db_ptr``
    where not wanted: ``col_tiles`` programs for each BLOCK_N make dW, one more makes db. Whole
    tiles of rows are taken as they are, the last is masked. Groups without rows get exact zeros.
    """
    programs = col_tiles
    if db_ptr is not None:
        programs += 1
    n0 = (tl.program_id(0) // programs) * BLOCK_N
    c = tl.program_id(0) % programs
    k0 = c * BLOCK_K
    n = n0 + tl.arange(0, BLOCK_N)
    k = k0 + tl.arange(0, BLOCK_K)
    g = tl.program_id(1)
    before = tl.zeros((1,), dtype=tl.int64)
    begin, end = 0, 0
    for block in range(0, BLOCKS):
        begins, ends, before = _bounds(sizes_ptr, block * BLOCK_G, before, T, G, BLOCK_G)
        here = block * BLOCK_G + tl.arange(0, BLOCK_G) == g
        begin += tl.sum(tl.where(here, begins, 0), 0)
        end += tl.sum(tl.where(here, ends, 0), 0)
    part = g.to(tl.int64) * N + n
    if dw_ptr is not None:  # noqa: SIM102 - the first condition is known when compiling
        if c < col_tiles:
            # fmt: off
            dw = _weight_tile(
                dy_ptr, saved_ptr, x_ptr, begin, end, dy_row, x_row, n0, k0, n, k, K, N,
                BLOCK_M, BLOCK_N, BLOCK_K, TMA, ACTIVATION, MATH, PRECISION, UPCAST,
            )
            # fmt: on
            out_mask = (n < N)[:, None] & (k < K)[None, :]
            ptrs = dw_ptr + part[:, None] * K + k[None, :]
            tl.store(ptrs, dw.to(dw_ptr.dtype.element_ty), mask=out_mask)
    if db_ptr is not None:  # noqa: SIM102
        if c == col_tiles:
            # fmt: off
            db = _bias_sums(
                dy_ptr, saved_ptr, begin, end, dy_row, n0, n, N,
                BLOCK_M, BLOCK_N, TMA, ACTIVATION, MATH,
            )
            # fmt: on
            tl.store(db_ptr + part, db.to(db_ptr.dtype.element_ty), mask=n < N)
