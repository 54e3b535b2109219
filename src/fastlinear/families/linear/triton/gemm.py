"""Triton matrix-multiplication kernels of linear_act: out = epilogue(A @ B).

Names used in every kernel: A is (ROWS, DEPTH), B is (DEPTH, COLS), out is (ROWS, COLS).
The forward has A = x, B = weight.T; grad_input A = dpre, B = weight; grad_weight A = dpre.T, B = x.
All accumulate in float32 and are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation


@triton.jit
def _tile_origin(tile, row_tiles, col_tiles, BLOCK_R, BLOCK_C, GROUP_R: tl.constexpr):
    """First row and first column of a tile, walked in bands of GROUP_R tile rows for L2 reuse."""
    band_tiles = GROUP_R * col_tiles
    band = tile // band_tiles
    first = band * GROUP_R
    height = tl.minimum(row_tiles - first, GROUP_R)
    inside = tile % band_tiles
    return (first + inside % height) * BLOCK_R, (inside // height) * BLOCK_C


@triton.jit
def _gemm_pointer_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    pre_ptr,
    ROWS,
    COLS,
    DEPTH,
    a_row_stride,
    a_depth_stride,
    b_depth_stride,
    b_col_stride,
    out_row_stride,
    split_depth,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_R: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS_BY: tl.constexpr = 1,
    COLS_BY: tl.constexpr = 1,
    DEPTH_BY: tl.constexpr = 1,
    STRIDES_BY: tl.constexpr = 1,
    A_ALONG: tl.constexpr = True,
    B_ALONG: tl.constexpr = True,
):
    """One program computes one tile over one slice of DEPTH, from operands of any strides.

    Program axis 0 is the tile, axis 1 the slice: slice s covers depths
    [s * split_depth, (s + 1) * split_depth) and writes rows [s * ROWS, (s + 1) * ROWS) of out, so
    with several slices out is a float32 workspace (slices * ROWS, COLS). ``bias_ptr`` (COLS,) and
    ``pre_ptr`` (like out) may be None. EVEN_DEPTH: every slice is a multiple of BLOCK_D.
    UPCAST multiplies in float32 (the CPU interpreter has no bfloat16). Sizes, and the strides that
    are not one, come divided by ``…_BY``: Triton knows by itself only what 16 divides. ``…_ALONG``:
    the depth has the stride of one.
    """
    ROWS *= ROWS_BY
    COLS *= COLS_BY
    DEPTH *= DEPTH_BY
    if A_ALONG:
        a_row_stride *= STRIDES_BY
    else:
        a_depth_stride *= STRIDES_BY
    if B_ALONG:
        b_col_stride *= STRIDES_BY
    else:
        b_depth_stride *= STRIDES_BY
    out_row_stride *= COLS_BY
    row_tiles = tl.cdiv(ROWS, BLOCK_R)
    col_tiles = tl.cdiv(COLS, BLOCK_C)
    r0, c0 = _tile_origin(tl.program_id(0), row_tiles, col_tiles, BLOCK_R, BLOCK_C, GROUP_R)
    piece = tl.program_id(1)
    d_begin = piece * split_depth
    d_end = tl.minimum(d_begin + split_depth, DEPTH)

    row_offs = r0 + tl.arange(0, BLOCK_R)
    col_offs = c0 + tl.arange(0, BLOCK_C)
    d_offs = tl.arange(0, BLOCK_D)
    # Rows and columns past the end wrap to valid memory; they are masked when stored.
    a_rows = (row_offs % ROWS).to(tl.int64)
    b_cols = (col_offs % COLS).to(tl.int64)
    d_first = (d_begin + d_offs).to(tl.int64)
    a_ptrs = a_ptr + a_rows[:, None] * a_row_stride + d_first[None, :] * a_depth_stride
    b_ptrs = b_ptr + d_first[:, None] * b_depth_stride + b_cols[None, :] * b_col_stride

    acc = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for d in range(d_begin, d_end, BLOCK_D):
        if EVEN_DEPTH:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            d_mask = d_offs < d_end - d
            a = tl.load(a_ptrs, mask=d_mask[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=d_mask[:, None], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_D * a_depth_stride
        b_ptrs += BLOCK_D * b_depth_stride

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col_offs, mask=col_offs < COLS, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out_mask = (row_offs < ROWS)[:, None] & (col_offs < COLS)[None, :]
    out_rows = (row_offs + piece * ROWS).to(tl.int64)
    out_offs = out_rows[:, None] * out_row_stride + col_offs[None, :]
    if pre_ptr is not None:
        tl.store(pre_ptr + out_offs, acc.to(pre_ptr.dtype.element_ty), mask=out_mask)
    out = activation(acc, ACTIVATION, MATH)
    tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _store_part(acc, bias, out_desc, pre_desc, r, c, ACTIVATION: tl.constexpr, MATH: tl.constexpr):
    """Bias, pre-activation store, activation, store of one part of a tile at (r, c)."""
    if bias is not None:
        acc += bias.to(tl.float32)[None, :]
    if pre_desc is not None:
        pre_desc.store([r, c], acc.to(pre_desc.dtype))
    out_desc.store([r, c], activation(acc, ACTIVATION, MATH).to(out_desc.dtype))


@triton.jit
def _load_bias(bias_ptr, c, COLS, BLOCK_C: tl.constexpr):
    """Bias of columns [c, c + BLOCK_C), or None."""
    if bias_ptr is None:
        bias = None
    else:
        offs = c + tl.arange(0, BLOCK_C)
        bias = tl.load(bias_ptr + offs, mask=offs < COLS, other=0.0)
    return bias


@triton.jit
def _gemm_tma_kernel(
    a_desc,
    b_desc,
    bias_ptr,
    out_desc,
    pre_desc,
    ROWS,
    COLS,
    DEPTH,
    split_depth,
    split_rows,
    SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_R: tl.constexpr,
    A_DEPTH_MAJOR: tl.constexpr,
    B_DEPTH_MAJOR: tl.constexpr,
    SUBTILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """PROGRAMS persistent programs walk all tiles; operands and results move by TMA.

    One loop over the depth steps of all its tiles lets loads of the next tile run under this tile's
    epilogue, which works on SUBTILE column parts one after the other.
    ``a_desc`` has blocks (BLOCK_R, BLOCK_D), or (BLOCK_D, BLOCK_R) when A is stored depth first
    (A_DEPTH_MAJOR); ``b_desc`` has blocks (BLOCK_C, BLOCK_D), or (BLOCK_D, BLOCK_C) when
    B_DEPTH_MAJOR. ``out_desc`` and ``pre_desc`` have blocks (BLOCK_R, BLOCK_C / SUBTILE).
    Slice s of DEPTH (SPLITS of them, split_depth long, a multiple of BLOCK_D) writes rows from
    s * split_rows on (a multiple of BLOCK_R).
    """
    row_tiles = tl.cdiv(ROWS, BLOCK_R)
    col_tiles = tl.cdiv(COLS, BLOCK_C)
    tiles = row_tiles * col_tiles
    steps = tl.cdiv(tl.minimum(split_depth, DEPTH), BLOCK_D)
    start = tl.program_id(0)
    my_tiles = (tiles * SPLITS - start + PROGRAMS - 1) // PROGRAMS
    # Before the first step: the last step of no tile.
    item = start - PROGRAMS
    step = steps - 1
    r0 = 0
    c0 = 0
    d = 0
    out_r = 0
    acc = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for _ in tl.range(0, my_tiles * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        d += BLOCK_D
        if step == 0:
            item += PROGRAMS
            piece = item // tiles
            r0, c0 = _tile_origin(item % tiles, row_tiles, col_tiles, BLOCK_R, BLOCK_C, GROUP_R)
            out_r = r0 + piece * split_rows
            d = piece * split_depth
        if A_DEPTH_MAJOR:
            a = a_desc.load([d, r0]).T
        else:
            a = a_desc.load([r0, d])
        if B_DEPTH_MAJOR:
            b = b_desc.load([d, c0])
        else:
            b = b_desc.load([c0, d]).T
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if step == steps - 1:
            if SUBTILE == 2:
                parts = tl.permute(tl.reshape(acc, (BLOCK_R, 2, BLOCK_C // 2)), (0, 2, 1))
                left, right = tl.split(parts)
                c1 = c0 + BLOCK_C // 2
                bias = _load_bias(bias_ptr, c0, COLS, BLOCK_C // 2)
                _store_part(left, bias, out_desc, pre_desc, out_r, c0, ACTIVATION, MATH)
                bias = _load_bias(bias_ptr, c1, COLS, BLOCK_C // 2)
                _store_part(right, bias, out_desc, pre_desc, out_r, c1, ACTIVATION, MATH)
            else:
                bias = _load_bias(bias_ptr, c0, COLS, BLOCK_C)
                _store_part(acc, bias, out_desc, pre_desc, out_r, c0, ACTIVATION, MATH)
            acc = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)


@triton.jit
def _sum_slices_kernel(
    part_ptr,
    bias_ptr,
    out_ptr,
    pre_ptr,
    SIZE,
    COLS,
    slice_stride,
    SLICES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program adds BLOCK elements of SLICES float32 slices (slice_stride apart), in order.

    The bias (COLS,) and the activation follow, as in the products' own epilogues.
    """
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in range(SLICES):
        acc += tl.load(part_ptr + s * slice_stride + offs, mask=mask, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs % COLS, mask=mask, other=0.0).to(tl.float32)
    if pre_ptr is not None:
        tl.store(pre_ptr + offs, acc.to(pre_ptr.dtype.element_ty), mask=mask)
    out = activation(acc, ACTIVATION, MATH)
    tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty), mask=mask)
