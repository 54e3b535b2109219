"""Triton kernels of diagonal_linear: one pass forward, one sweep and a small sum backward.

x (M, K) is read as ROWS rows of WIDTH numbers: K of them, or several rows of K side by side
(FOLDED), the last of LAST. All arithmetic is float32; ``MATH`` as in activations/triton.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation, activation_grad_at


@triton.jit
def _parameters(ptr, col_offs, K, WIDTH, FOLDED: tl.constexpr, EVEN: tl.constexpr):
    """The numbers of a parameter (K,) that belong to columns, as float32."""
    if FOLDED:
        value = tl.load(ptr + col_offs % K)
    elif EVEN:
        value = tl.load(ptr + col_offs)
    else:
        value = tl.load(ptr + col_offs, mask=col_offs < WIDTH, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _turned_parameters(
    ptr, row_offs, col, col_offs, K, WIDTH, widths, FOLDED: tl.constexpr, PAIRED: tl.constexpr
):
    """The numbers of a parameter for the columns, from col on, of rows of one or several features.

    Rows have ``widths`` numbers, K of a feature; with PAIRED a tile's columns lie in two features.
    """
    first = col // K
    offs = row_offs * (WIDTH // K) + first
    if not FOLDED:
        value = tl.load(ptr + offs, mask=widths > 0, other=0.0)[:, None]
    elif PAIRED:
        end = (first + 1) * K
        one = tl.load(ptr + offs, mask=first * K < widths, other=0.0)
        two = tl.load(ptr + offs + 1, mask=end < widths, other=0.0)
        value = tl.where((col_offs < end)[None, :], one[:, None], two[:, None])
    else:
        offs = offs[:, None] + (col_offs // K - first)[None, :]
        value = tl.load(ptr + offs, mask=col_offs[None, :] < widths[:, None], other=0.0)
    return value.to(tl.float32)


@triton.jit
def _begin(EARLY: tl.constexpr):
    """Wait for the end of the kernel before; with "first" the next one may begin now."""
    if EARLY == "first":
        tl.extra.cuda.gdc_launch_dependents()
    if EARLY != "":
        tl.extra.cuda.gdc_wait()


@triton.jit
def _end(EARLY: tl.constexpr):
    """With "last" the next kernel may begin now."""
    if EARLY == "last":
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _tile(ptr, row_offs, col_offs, row_stride, mask, EVEN: tl.constexpr):
    """A tile (BLOCK_M, BLOCK_K) as float32, 0 outside the mask."""
    ptrs = ptr + row_offs.to(tl.int64)[:, None] * row_stride + col_offs[None, :]
    if EVEN:
        value = tl.load(ptrs)
    else:
        value = tl.load(ptrs, mask=mask, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _store(ptr, row_offs, col_offs, WIDTH, mask, value, EVEN: tl.constexpr):
    ptrs = ptr + row_offs.to(tl.int64)[:, None] * WIDTH + col_offs[None, :]
    value = value.to(ptr.dtype.element_ty)
    if EVEN:
        tl.store(ptrs, value)
    else:
        tl.store(ptrs, value, mask=mask)


@triton.jit
def _widths(row_offs, ROWS, WIDTH, LAST):
    """Numbers of each row; 0 of one that does not exist."""
    return tl.where(row_offs < ROWS - 1, WIDTH, tl.where(row_offs < ROWS, LAST, 0))


@triton.jit
def _inside(row_offs, col_offs, ROWS, WIDTH, LAST):
    """Which numbers of a tile exist: the last row is shorter than the others.

    Columns meet each width itself: Triton 3.9 knows no multiples of a width that was chosen by row.
    """
    before = (row_offs < ROWS - 1)[:, None] & (col_offs < WIDTH)[None, :]
    return before | ((row_offs < ROWS)[:, None] & (col_offs < LAST)[None, :])


@triton.jit
def _diagonal_linear_fwd_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    residual_ptr,
    y_ptr,
    ROWS,
    WIDTH,
    LAST,
    K,
    STRIPS,
    BLOCKS,
    x_row_stride,
    residual_row_stride,
    FOLDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
    TURNED: tl.constexpr,
    PAIRED: tl.constexpr,
    MORE: tl.constexpr,
):
    """One program computes y = act(x w + b) + residual on BLOCK_K columns of every STRIPS-th tile
    of BLOCK_M rows.

    BLOCKS programs share a tile's rows. y is dense. b_ptr and residual_ptr may be None. With EVEN
    every tile lies inside. With TURNED a row is a feature, or several: each has a number of w and
    of b; PAIRED as in ``_turned_parameters``. MORE numbers, fewer than 16, follow LAST: 16 bytes
    move at once only where rows are multiples of 16.
    """
    _begin(EARLY)
    strip = tl.program_id(0) // BLOCKS
    col = (tl.program_id(0) % BLOCKS) * BLOCK_K
    col_offs = col + tl.arange(0, BLOCK_K)
    if not TURNED:
        w = _parameters(w_ptr, col_offs, K, WIDTH, FOLDED, EVEN)[None, :]
        if b_ptr is not None:
            b = _parameters(b_ptr, col_offs, K, WIDTH, FOLDED, EVEN)[None, :]
    for row in tl.range(strip * BLOCK_M, ROWS, STRIPS * BLOCK_M, num_stages=STAGES):
        row_offs = row + tl.arange(0, BLOCK_M)
        mask = _inside(row_offs, col_offs, ROWS, WIDTH, LAST)
        if TURNED:
            widths = _widths(row_offs, ROWS, WIDTH, LAST)
            w = _turned_parameters(w_ptr, row_offs, col, col_offs, K, WIDTH, widths, FOLDED, PAIRED)
            if b_ptr is not None:
                b = _turned_parameters(
                    b_ptr, row_offs, col, col_offs, K, WIDTH, widths, FOLDED, PAIRED
                )
        pre = _tile(x_ptr, row_offs, col_offs, x_row_stride, mask, EVEN) * w
        if b_ptr is not None:
            pre += b
        y = activation(pre, ACTIVATION, MATH)
        if residual_ptr is not None:
            y += _tile(residual_ptr, row_offs, col_offs, residual_row_stride, mask, EVEN)
        _store(y_ptr, row_offs, col_offs, WIDTH, mask, y, EVEN)
    if MORE > 0 and tl.program_id(0) == tl.num_programs(0) - 1:
        cols = LAST + tl.arange(0, 16)
        last_row = ROWS - 1 + tl.arange(0, 1)
        here = (tl.arange(0, 16) < MORE)[None, :]
        rest = _tile(x_ptr, last_row, cols, x_row_stride, here, False)
        if TURNED:
            all_of = _widths(last_row, ROWS, WIDTH, LAST + MORE)
            rest *= _turned_parameters(w_ptr, last_row, LAST, cols, K, WIDTH, all_of, True, PAIRED)
            if b_ptr is not None:
                rest += _turned_parameters(
                    b_ptr, last_row, LAST, cols, K, WIDTH, all_of, True, PAIRED
                )
        else:
            rest *= _parameters(w_ptr, cols, K, WIDTH, True, False)[None, :]
            if b_ptr is not None:
                rest += _parameters(b_ptr, cols, K, WIDTH, True, False)[None, :]
        rest = activation(rest, ACTIVATION, MATH)
        if residual_ptr is not None:
            rest += _tile(residual_ptr, last_row, cols, residual_row_stride, here, False)
        _store(y_ptr, last_row, cols, WIDTH, here, rest, False)
    _end(EARLY)


@triton.jit
def _diagonal_linear_bwd_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    ROWS,
    WIDTH,
    LAST,
    K,
    STRIPS,
    BLOCKS,
    x_row_stride,
    FOLDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes dx, and its strip's part of dw and db, on BLOCK_K columns of every
    STRIPS-th tile of BLOCK_M rows.

    dpre = dy act'(x w + b), dx = dpre w, dw = Σ dpre x, db = Σ dpre. dy and dx are dense. dw and db
    are (strips, WIDTH) float32, or with one strip of whole rows the sums themselves, (K,) in their
    own dtype. Results that are not wanted are None, as is what is then not read.
    """
    _begin(EARLY)
    strip = tl.program_id(0) // BLOCKS
    col_offs = (tl.program_id(0) % BLOCKS) * BLOCK_K + tl.arange(0, BLOCK_K)
    if w_ptr is not None:
        w = _parameters(w_ptr, col_offs, K, WIDTH, FOLDED, EVEN)[None, :]
    if b_ptr is not None:
        b = _parameters(b_ptr, col_offs, K, WIDTH, FOLDED, EVEN)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for row in tl.range(strip * BLOCK_M, ROWS, STRIPS * BLOCK_M, num_stages=STAGES):
        row_offs = row + tl.arange(0, BLOCK_M)
        mask = _inside(row_offs, col_offs, ROWS, WIDTH, LAST)
        dpre = _tile(dy_ptr, row_offs, col_offs, WIDTH, mask, EVEN)
        if x_ptr is not None:
            x = _tile(x_ptr, row_offs, col_offs, x_row_stride, mask, EVEN)
        if ACTIVATION != "none":
            pre = x * w
            if b_ptr is not None:
                pre += b
            dpre = activation_grad_at(dpre, pre, ACTIVATION, MATH)
        if dx_ptr is not None:
            _store(dx_ptr, row_offs, col_offs, WIDTH, mask, dpre * w, EVEN)
        if dw_ptr is not None:
            dw += dpre * x
        if db_ptr is not None:
            db += dpre
    _end(EARLY)
    part_offs = strip.to(tl.int64) * WIDTH + col_offs
    if dw_ptr is not None:
        _store_sums(dw_ptr + part_offs, tl.sum(dw, axis=0), col_offs, WIDTH, EVEN)
    if db_ptr is not None:
        _store_sums(db_ptr + part_offs, tl.sum(db, axis=0), col_offs, WIDTH, EVEN)


@triton.jit
def _store_sums(ptrs, sums, col_offs, WIDTH, EVEN: tl.constexpr):
    sums = sums.to(ptrs.dtype.element_ty)
    if EVEN:
        tl.store(ptrs, sums)
    else:
        tl.store(ptrs, sums, mask=col_offs < WIDTH)


@triton.jit
def _sum_parts_kernel(
    dw_part_ptr,
    db_part_ptr,
    dw_ptr,
    db_ptr,
    PARTS,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program adds the PARTS rows of a part (PARTS, K) float32 on BLOCK_K columns, in order.

    Programs of the second axis take dw first, then db; where dw is None, db.
    """
    _begin(EARLY)
    col_offs = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    if dw_ptr is None:
        _sum_columns(db_part_ptr, db_ptr, col_offs, PARTS, K, BLOCK_M)
    elif db_ptr is None:
        _sum_columns(dw_part_ptr, dw_ptr, col_offs, PARTS, K, BLOCK_M)
    else:
        if tl.program_id(1) == 0:
            _sum_columns(dw_part_ptr, dw_ptr, col_offs, PARTS, K, BLOCK_M)
        else:
            _sum_columns(db_part_ptr, db_ptr, col_offs, PARTS, K, BLOCK_M)


@triton.jit
def _sum_columns(part_ptr, out_ptr, col_offs, PARTS, K, BLOCK_M: tl.constexpr):
    total = tl.zeros((BLOCK_M, col_offs.shape[0]), dtype=tl.float32)
    col_mask = col_offs < K
    for row in range(0, PARTS, BLOCK_M):
        row_offs = row + tl.arange(0, BLOCK_M)
        mask = (row_offs < PARTS)[:, None] & col_mask[None, :]
        offs = row_offs.to(tl.int64)[:, None] * K + col_offs[None, :]
        total += tl.load(part_ptr + offs, mask=mask, other=0.0)
    sums = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + col_offs, sums, mask=col_mask)
