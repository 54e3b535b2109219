"""Triton kernel of linear_act: the whole backward of any number of rows in one launch.

Programs of three kinds, none of which waits for another: tiles of dx, tiles of dW, strips of db.
Each forms the part of dpre it needs. Accumulates in float32; deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.families.linear.triton.few_rows import _dpre


@triton.jit
def _carry(sums, total, depth, SPAN: tl.constexpr = 1024):
    """(sums, total) at a depth: sums of each SPAN go into the total, as long chains round."""
    if depth % SPAN == 0:
        total += sums
        sums = tl.zeros_like(sums)
    return sums, total


@triton.jit
def _dx_tile(
    dy_ptr,
    saved_ptr,
    w_ptr,
    dx_ptr,
    M,
    N,
    K,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    w_row_stride,
    w_col_stride,
    tile,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEEP: tl.constexpr,
    EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One (BLOCK_M, BLOCK_K) tile of dx = dpre W, BLOCK_N rows of W at a time."""
    strips = tl.cdiv(K, BLOCK_K)
    row_offs = tile // strips * BLOCK_M + tl.arange(0, BLOCK_M)
    col_offs = tile % strips * BLOCK_K + tl.arange(0, BLOCK_K)
    n_offs = tl.arange(0, BLOCK_N)
    # Rows and columns past the end wrap to valid memory; they are masked when stored.
    rows = (row_offs % M).to(tl.int64)[:, None]
    cols = (col_offs % K).to(tl.int64)[None, :]
    n64 = n_offs.to(tl.int64)
    dy_ptrs = dy_ptr + rows * dy_row_stride + n64[None, :] * dy_col_stride
    saved_ptrs = dy_ptrs
    if saved_ptr is not None:
        saved_ptrs = saved_ptr + rows * saved_row_stride + n64[None, :]
    w_ptrs = w_ptr + n64[:, None] * w_row_stride + cols * w_col_stride
    dx = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    if DEEP:
        total = tl.zeros_like(dx)
    for start in range(0, N, BLOCK_N * CHUNKS):
        for chunk in tl.static_range(CHUNKS):
            mask = n_offs < N - start - chunk * BLOCK_N
            if not EVEN:  # first: masks of both at once take registers
                w = tl.load(w_ptrs, mask=mask[:, None], other=0.0)
            grad = _dpre(
                dy_ptrs, saved_ptrs, mask[None, :], saved_ptr is not None, ACTIVATION, MATH, EVEN
            )
            if EVEN:
                w = tl.load(w_ptrs)
            grad = grad.to(dy_ptr.dtype.element_ty)
            if UPCAST:
                grad = grad.to(tl.float32)
                w = w.to(tl.float32)
            dx = tl.dot(grad, w, dx, input_precision=PRECISION)
            dy_ptrs += tl.full((), BLOCK_N, tl.int64) * dy_col_stride
            w_ptrs += tl.full((), BLOCK_N, tl.int64) * w_row_stride
            if saved_ptr is not None:
                saved_ptrs += BLOCK_N
        if DEEP:
            dx, total = _carry(dx, total, start + BLOCK_N * CHUNKS)
    if DEEP:
        dx += total
    offs = row_offs.to(tl.int64)[:, None] * K + col_offs[None, :]
    inside = (row_offs < M)[:, None] & (col_offs < K)[None, :]
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dw_tile(
    dy_ptr,
    saved_ptr,
    x_ptr,
    dw_ptr,
    M,
    N,
    K,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    x_row_stride,
    x_col_stride,
    tile,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEEP: tl.constexpr,
    EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One (BLOCK_N, BLOCK_K) tile of dW = dpreᵀ x, BLOCK_M rows of x at a time."""
    strips = tl.cdiv(K, BLOCK_K)
    row_offs = tile // strips * BLOCK_N + tl.arange(0, BLOCK_N)
    col_offs = tile % strips * BLOCK_K + tl.arange(0, BLOCK_K)
    m_offs = tl.arange(0, BLOCK_M)
    m64 = m_offs.to(tl.int64)[:, None]
    ns = (row_offs % N).to(tl.int64)[None, :]
    dy_ptrs = dy_ptr + m64 * dy_row_stride + ns * dy_col_stride
    saved_ptrs = dy_ptrs
    if saved_ptr is not None:
        saved_ptrs = saved_ptr + m64 * saved_row_stride + ns
    x_ptrs = x_ptr + m64 * x_row_stride + (col_offs % K).to(tl.int64)[None, :] * x_col_stride
    dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if DEEP:
        total = tl.zeros_like(dw)
    for start in range(0, M, BLOCK_M * CHUNKS):
        for chunk in tl.static_range(CHUNKS):
            mask = (m_offs < M - start - chunk * BLOCK_M)[:, None]
            if not EVEN:
                x = tl.load(x_ptrs, mask=mask, other=0.0)
            grad = _dpre(dy_ptrs, saved_ptrs, mask, saved_ptr is not None, ACTIVATION, MATH, EVEN)
            if EVEN:
                x = tl.load(x_ptrs)
            grad = grad.to(dy_ptr.dtype.element_ty)
            if UPCAST:
                grad = grad.to(tl.float32)
                x = x.to(tl.float32)
            dw = tl.dot(tl.trans(grad), x, dw, input_precision=PRECISION)
            dy_ptrs += tl.full((), BLOCK_M, tl.int64) * dy_row_stride
            x_ptrs += tl.full((), BLOCK_M, tl.int64) * x_row_stride
            if saved_ptr is not None:
                saved_ptrs += tl.full((), BLOCK_M, tl.int64) * saved_row_stride
        if DEEP:
            dw, total = _carry(dw, total, start + BLOCK_M * CHUNKS)
    if DEEP:
        dw += total
    offs = row_offs.to(tl.int64)[:, None] * K + col_offs[None, :]
    inside = (row_offs < N)[:, None] & (col_offs < K)[None, :]
    tl.store(dw_ptr + offs, dw.to(dw_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _db_strip(
    dy_ptr,
    saved_ptr,
    db_ptr,
    M,
    N,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    strip,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EVEN: tl.constexpr,
):
    """BLOCK_N elements of db: the column sums of dpre, before it is rounded."""
    n_offs = strip * BLOCK_N + tl.arange(0, BLOCK_N)
    m_offs = tl.arange(0, BLOCK_M)
    m64 = m_offs.to(tl.int64)[:, None]
    ns = (n_offs % N).to(tl.int64)[None, :]
    dy_ptrs = dy_ptr + m64 * dy_row_stride + ns * dy_col_stride
    saved_ptrs = dy_ptrs
    if saved_ptr is not None:
        saved_ptrs = saved_ptr + m64 * saved_row_stride + ns
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total = tl.zeros_like(sums)
    for m in range(0, M, BLOCK_M):
        mask = (m_offs < M - m)[:, None]
        grad = _dpre(dy_ptrs, saved_ptrs, mask, saved_ptr is not None, ACTIVATION, MATH, EVEN)
        sums, total = _carry(sums + grad.to(tl.float32), total, m + BLOCK_M)
        dy_ptrs += tl.full((), BLOCK_M, tl.int64) * dy_row_stride
        if saved_ptr is not None:
            saved_ptrs += tl.full((), BLOCK_M, tl.int64) * saved_row_stride
    db = tl.sum(total + sums, axis=0)
    tl.store(db_ptr + n_offs, db.to(db_ptr.dtype.element_ty), mask=n_offs < N)


@triton.jit
def _tiles_backward_kernel(
    dy_ptr,
    saved_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    M,
    N,
    K,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    x_row_stride,
    x_col_stride,
    w_row_stride,
    w_col_stride,
    dx_programs,
    dw_programs,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    DX_PRECISION: tl.constexpr,
    DW_PRECISION: tl.constexpr,
    DX_M: tl.constexpr,
    DX_K: tl.constexpr,
    DX_N: tl.constexpr,
    DW_N: tl.constexpr,
    DW_K: tl.constexpr,
    DW_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEEP_M: tl.constexpr,
    DEEP_N: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Programs below dx_programs compute one (DX_M, DX_K) tile of dx each, those below
    dx_programs + dw_programs one (DW_N, DW_K) tile of dW, the others DW_N elements of db.

    dy and saved are (M, N), the latter with unit stride along N, or None; x (M, K) and w (N, K)
    have any strides; dx (M, K), dw (N, K) and db (N,) are contiguous, and None where not wanted.
    Tiles take CHUNKS steps of DX_N rows of W, or DW_M rows of x, at a time. DEEP_M, DEEP_N: sums
    over M, or N, are carried. EVEN_M: M is a multiple of DW_M * CHUNKS; EVEN_N: N is one of DX_N *
    CHUNKS. UPCAST multiplies in float32
    (the CPU interpreter has no bfloat16). dpre is rounded to the dtype of dy before the products.
    """
    pid = tl.program_id(0)
    if pid < dx_programs:
        if dx_ptr is not None:
            _dx_tile(
                dy_ptr,
                saved_ptr,
                w_ptr,
                dx_ptr,
                M,
                N,
                K,
                dy_row_stride,
                dy_col_stride,
                saved_row_stride,
                w_row_stride,
                w_col_stride,
                pid,
                ACTIVATION,
                MATH,
                DX_PRECISION,
                DX_M,
                DX_K,
                DX_N,
                CHUNKS,
                DEEP_N,
                EVEN_N,
                UPCAST,
            )
    elif pid < dx_programs + dw_programs:
        if dw_ptr is not None:
            _dw_tile(
                dy_ptr,
                saved_ptr,
                x_ptr,
                dw_ptr,
                M,
                N,
                K,
                dy_row_stride,
                dy_col_stride,
                saved_row_stride,
                x_row_stride,
                x_col_stride,
                pid - dx_programs,
                ACTIVATION,
                MATH,
                DW_PRECISION,
                DW_N,
                DW_K,
                DW_M,
                CHUNKS,
                DEEP_M,
                EVEN_M,
                UPCAST,
            )
    elif db_ptr is not None:
        _db_strip(
            dy_ptr,
            saved_ptr,
            db_ptr,
            M,
            N,
            dy_row_stride,
            dy_col_stride,
            saved_row_stride,
            pid - dx_programs - dw_programs,
            ACTIVATION,
            MATH,
            DW_N,
            DW_M,
            EVEN_M,
        )
