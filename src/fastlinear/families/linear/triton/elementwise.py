"""Triton kernels of linear_act without a product: dpre = dy * act'(pre) and db; copies of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation_grad
from fastlinear.kernels.triton.sums_kernels import store_sums


@triton.jit
def _grad_pre_tile(
    dy_ptr,
    saved_ptr,
    dpre_ptr,
    rows,
    cols,
    row_mask,
    ends,
    dpre_ends,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    dpre_row_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
):
    """dpre of a tile in float32, written in its own dtype; rows have ``ends`` numbers, and dpre's
    ``dpre_ends``: numbers or (rows, 1)."""
    mask = row_mask[:, None] & (cols[None, :] < ends)
    offs = rows[:, None] * dy_row_stride + cols.to(tl.int64)[None, :] * dy_col_stride
    grad = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if saved_ptr is not None:
        offs = rows[:, None] * saved_row_stride + cols[None, :]
        saved = tl.load(saved_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        grad = activation_grad(grad, saved, ACTIVATION, MATH)
    if dpre_ptr is not None:
        to = dpre_ptr + rows[:, None] * dpre_row_stride + cols[None, :]
        mask = row_mask[:, None] & (cols[None, :] < dpre_ends)
        tl.store(to, grad.to(dpre_ptr.dtype.element_ty), mask=mask)
    return grad


@triton.jit
def _grad_pre_kernel(
    dy_ptr,
    saved_ptr,
    dpre_ptr,
    part_ptr,
    scratch_ptr,
    M,
    units,
    last,
    dy_row_stride,
    dy_col_stride,
    saved_row_stride,
    more_columns,
    chunk_rows,
    fold,
    UNIT: tl.constexpr,
    DENSE: tl.constexpr,
    FOLD: tl.constexpr,
    EACH: tl.constexpr,
    CUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program computes dpre on chunk_rows rows by BLOCK_N columns.

    Of several chunks the rows are a multiple of BLOCK_M. N = units UNIT; DENSE: all have their rows
    behind each other. CUT: the last row has ``last`` numbers. It is apart, as where it ends hides
    from the compiler how aligned masks are. dpre has N + more_columns columns, zeros in those: a
    sum, so that odd N hides it as well. It would give threads 8 neighbours each, of which dy's have
    to be loaded one by one, from all over the memory. ``saved_ptr`` (M, N) is None for "none".
    ``part_ptr``, when not None, takes the chunk's column sums of dpre (before rounding), as
    ``store_sums`` has it: the first stage of db in float32, or, with one chunk, db itself in its
    own dtype.
    """
    N = units * UNIT
    if DENSE:  # of one column any stride is given
        dy_row_stride, dy_col_stride, saved_row_stride = N, 1, N
    chunk = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_begin = chunk * chunk_rows
    row_end = tl.minimum(row_begin + chunk_rows, M)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dpre_columns = N + more_columns
    whole_end = row_end
    if CUT and row_end == M:
        whole_end -= (M - row_begin - 1) % BLOCK_M + 1
    given = dy_ptr, saved_ptr, dpre_ptr
    strides = dy_row_stride, dy_col_stride, saved_row_stride, dpre_columns
    for row in tl.range(row_begin, whole_end, BLOCK_M, num_stages=STAGES):
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        place = rows, cols, rows < row_end, N, dpre_columns
        total += _grad_pre_tile(*given, *place, *strides, ACTIVATION, MATH)
    if CUT and row_end == M:
        rows = (whole_end + tl.arange(0, BLOCK_M)).to(tl.int64)
        ends = tl.where(rows < M - 1, N, last)[:, None]
        place = rows, cols, rows < M, ends, ends
        total += _grad_pre_tile(*given, *place, *strides, ACTIVATION, MATH)
    if part_ptr is not None:
        sums = tl.sum(total, axis=0)
        store_sums(part_ptr, scratch_ptr, sums, chunk, cols, N, fold, FOLD, EACH)


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
