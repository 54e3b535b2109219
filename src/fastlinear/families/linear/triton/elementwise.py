"""Triton kernels of linear_act without a product: dpre = dy * act'(pre) and db; copies of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation_grad


@triton.jit
def _grad_pre_kernel(
    dy_ptr,
    saved_ptr,
    dpre_ptr,
    part_ptr,
    M,
    N,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    more_columns,
    chunk_rows,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program computes dpre on chunk_rows rows (a multiple of BLOCK_M) by BLOCK_N columns.

    dpre has N + more_columns columns, zeros in those: a sum, so that odd N hides from the compiler
    how aligned they are. It would give threads 8 neighbours each, of which dy's have to be loaded
    one by one, from all over the memory. ``saved_ptr`` (M, N) is None for "none". ``part_ptr``,
    when not None, is (chunks, N) and takes the chunk's column sums of dpre (before rounding): the
    first stage of db in float32, or, with one chunk, db itself in its own dtype.
    """
    dpre_columns = N + more_columns
    chunk = tl.program_id(1)
    col_offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = col_offs < N
    row_begin = chunk * chunk_rows
    row_end = tl.minimum(row_begin + chunk_rows, M)
    dy_cols = col_offs.to(tl.int64)[None, :] * dy_col_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for row in tl.range(row_begin, row_end, BLOCK_M, num_stages=STAGES):
        row_offs = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (row_offs < row_end)[:, None] & col_mask[None, :]
        dy = tl.load(dy_ptr + row_offs[:, None] * dy_row_stride + dy_cols, mask=mask, other=0.0)
        grad = dy.to(tl.float32)
        if saved_ptr is not None:
            saved_ptrs = saved_ptr + row_offs[:, None] * saved_row_stride + col_offs[None, :]
            saved = tl.load(saved_ptrs, mask=mask, other=0.0).to(tl.float32)
            grad = activation_grad(grad, saved, ACTIVATION, MATH)
        if dpre_ptr is not None:
            out_ptrs = dpre_ptr + row_offs[:, None] * dpre_columns + col_offs[None, :]
            out_mask = (row_offs < row_end)[:, None] & (col_offs < dpre_columns)[None, :]
            tl.store(out_ptrs, grad.to(dpre_ptr.dtype.element_ty), mask=out_mask)
        if part_ptr is not None:
            total += grad
    if part_ptr is not None:
        part_ptrs = part_ptr + chunk.to(tl.int64) * N + col_offs
        sums = tl.sum(total, axis=0)
        tl.store(part_ptrs, sums.to(part_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _sum_rows_kernel(part_ptr, out_ptr, ROWS, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program adds all ROWS rows of part (ROWS, N) float32 on BLOCK_N columns, in order."""
    col_offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = col_offs < N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for row in range(0, ROWS, BLOCK_M):
        row_offs = row + tl.arange(0, BLOCK_M)
        mask = (row_offs < ROWS)[:, None] & col_mask[None, :]
        offs = row_offs.to(tl.int64)[:, None] * N + col_offs[None, :]
        total += tl.load(part_ptr + offs, mask=mask, other=0.0)
    sums = tl.sum(total, axis=0)
    tl.store(out_ptr + col_offs, sums.to(out_ptr.dtype.element_ty), mask=col_mask)


@triton.jit
def _copy_rows_kernel(
    src_ptr,
    out_ptr,
    ROWS,
    COLS,
    more_src,
    OUT_ROWS,
    more_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program writes BLOCK_M x BLOCK_N of out (OUT_ROWS, COLS + more_columns), dense: src
    (ROWS, COLS), rows COLS + more_src apart, where it has such rows and columns, zeros elsewhere.
    Sums as in ``_grad_pre_kernel``."""
    src_row_stride, OUT_COLS = COLS + more_src, COLS + more_columns
    across = tl.cdiv(OUT_COLS, BLOCK_N)  # one axis of programs: the others end at 65535
    col_offs = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    row_offs = (tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    known = (row_offs < ROWS)[:, None] & (col_offs < COLS)[None, :]
    src_ptrs = src_ptr + row_offs[:, None] * src_row_stride + col_offs[None, :]
    values = tl.load(src_ptrs, mask=known, other=0)
    mask = (row_offs < OUT_ROWS)[:, None] & (col_offs < OUT_COLS)[None, :]
    tl.store(out_ptr + row_offs[:, None] * OUT_COLS + col_offs[None, :], values, mask=mask)


@triton.jit
def _turn_kernel(from_ptr, to_ptr, ROWS, COLS, row_stride, TO_COLS, BLOCK: tl.constexpr):
    """One program moves a tile of BLOCK x BLOCK of (ROWS, COLS) to its place in (COLS, TO_COLS),
    with zeros from column ROWS on."""
    across = tl.cdiv(COLS, BLOCK)
    rows = (tl.program_id(0) // across * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    cols = (tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = (rows < ROWS)[:, None] & (cols < COLS)[None, :]
    tile = tl.load(from_ptr + rows[:, None] * row_stride + cols[None, :], mask=mask, other=0.0)
    to = to_ptr + cols[:, None] * TO_COLS + rows[None, :]
    there = (rows < TO_COLS)[:, None] & (cols < COLS)[None, :]
    tl.store(to, tl.trans(tile), mask=tl.trans(there))
