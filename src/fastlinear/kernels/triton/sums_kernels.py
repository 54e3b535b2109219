"""Triton kernels of column sums: how a program leaves its own, and the second stage."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_sums(
    part_ptr,
    scratch_ptr,
    sums,
    chunk,
    col_offs,
    N,
    fold,
    FOLD: tl.constexpr,
    EACH: tl.constexpr,
):
    """The column sums of a chunk of rows of N numbers, to their place in part, (chunks, N).

    With FOLD > 1 each row is ``fold`` rows side by side and part (chunks, N / fold): sums of the
    same column are added up in order, by way of ``scratch_ptr``, (chunks, N) in float32, in a
    program that has all columns. FOLD and EACH are powers of two, no less than fold and N / fold.
    """
    if FOLD > 1:
        each = N // fold
        here = scratch_ptr + chunk.to(tl.int64) * N
        tl.store(here + col_offs, sums, mask=col_offs < N)
        tl.debug_barrier()  # the program's own numbers, of other threads
        row, col = tl.arange(0, FOLD), tl.arange(0, EACH)
        known = (row < fold)[:, None] & (col < each)[None, :]
        sides = tl.load(here + row[:, None] * each + col[None, :], mask=known, other=0.0)
        added = tl.sum(sides, axis=0).to(part_ptr.dtype.element_ty)
        tl.store(part_ptr + chunk.to(tl.int64) * each + col, added, mask=col < each)
    else:
        to = part_ptr + chunk.to(tl.int64) * N + col_offs
        tl.store(to, sums.to(part_ptr.dtype.element_ty), mask=col_offs < N)


@triton.jit
def _sum_rows_kernel(
    part_ptr, out_ptr, other_ptr, ROWS, N, step, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program adds all ROWS rows of part (ROWS, N) float32 on BLOCK_N columns, in order.

    Programs of the grid's second row add up ROWS rows behind these, for ``other_ptr``. Columns of
    both results are ``step`` apart.
    """
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    part_ptr += tl.program_id(1).to(tl.int64) * ROWS * N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for row in range(0, ROWS, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        mask = (rows < ROWS)[:, None] & col_mask[None, :]
        offs = rows.to(tl.int64)[:, None] * N + cols[None, :]
        total += tl.load(part_ptr + offs, mask=mask, other=0.0)
    sums = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    if other_ptr is not None and tl.program_id(1) == 1:
        tl.store(other_ptr + cols * step, sums, mask=col_mask)
    else:
        tl.store(out_ptr + cols * step, sums, mask=col_mask)
