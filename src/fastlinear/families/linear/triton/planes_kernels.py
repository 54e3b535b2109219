"""Triton kernels of products of float32 by three products of float16: scales, planes, products.

As ``cuda/planes.h`` has it, x = s (h + l / 2^11), here with one scale s for a line: a row of A, a
column of B. A line has no planes where it holds an infinity or NaN, nonzero numbers some 2^29 below
its largest or beyond, or a largest that is far from 1: its tiles are multiplied as float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation
from fastlinear.families.linear.triton.gemm import _tile_origin

_TOP = tl.constexpr(14)  # a line's largest number is put between 2^14 and 2^15
_SPAN = tl.constexpr(29)
_LEAST = tl.constexpr(127 - 100)  # exponents as they are stored, of lines that have planes
_MOST = tl.constexpr(127 + 90)


@triton.jit
def _scales_kernel(
    x_ptr,
    scale_ptr,
    LINES,
    DEPTH,
    line_stride,
    depth_stride,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Scales of lines (LINES); -1 of those without planes. A program looks at BLOCK_L lines."""
    lines = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = lines < LINES
    line_offs = lines.to(tl.int64)[:, None] * line_stride
    most = tl.zeros((BLOCK_L,), dtype=tl.int32)
    least = tl.full((BLOCK_L,), 0x7FFFFFFF, dtype=tl.int32)
    for d in range(0, DEPTH, BLOCK_D):
        depths = d + tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (depths < DEPTH)[None, :]
        offs = line_offs + depths.to(tl.int64)[None, :] * depth_stride
        x = tl.load(x_ptr + offs, mask=mask, other=0.0)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        most = tl.maximum(most, tl.max(bits, 1))
        least = tl.minimum(least, tl.min(tl.where(bits == 0, 0x7FFFFFFF, bits), 1))
    top = most >> 23
    narrow = (least >> 23) >= top - _SPAN
    serves = (most == 0) | ((top >= _LEAST) & (top < _MOST) & narrow)
    scale = (tl.where(most == 0, 127, top - _TOP) << 23).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + lines, tl.where(serves, scale, -1.0), mask=inside)


@triton.jit
def _split_kernel(
    x_ptr,
    scale_ptr,
    high_ptr,
    low_ptr,
    LINES,
    DEPTH,
    line_stride,
    depth_stride,
    pitch,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Planes (LINES, pitch), zeros behind the depth; of lines without planes anything finite."""
    lines = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    depths = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = lines < LINES
    scale = tl.load(scale_ptr + lines, mask=inside, other=1.0)
    offs = lines.to(tl.int64)[:, None] * line_stride + depths.to(tl.int64)[None, :] * depth_stride
    x = tl.load(x_ptr + offs, mask=inside[:, None] & (depths < DEPTH)[None, :], other=0.0)
    x = tl.where(scale[:, None] > 0, x / scale[:, None], 0.0)
    high = x.to(tl.float16)
    low = ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)
    out = lines.to(tl.int64)[:, None] * pitch + depths[None, :]
    tl.store(high_ptr + out, high, mask=inside[:, None])
    tl.store(low_ptr + out, low, mask=inside[:, None])


@triton.jit
def _planes_kernel(
    a_ptr,
    b_ptr,
    a_high_ptr,
    a_low_ptr,
    a_scale_ptr,
    b_high_ptr,
    b_low_ptr,
    b_scale_ptr,
    bias_ptr,
    out_ptr,
    pre_ptr,
    ROWS,
    COLS,
    DEPTH,
    pitch,
    a_row_stride,
    a_depth_stride,
    b_col_stride,
    b_depth_stride,
    split_depth,
    three,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PLAIN_D: tl.constexpr,
    GROUP_R: tl.constexpr,
):
    """One program computes one tile over one slice of the depth, as ``_gemm_pointer_kernel``.

    ``three`` is 3, which the compiler is not told: sums of BLOCK_D products of high planes stay
    apart from those before, since matrix units truncate where they add.
    """
    one = (three - 2).to(tl.float32)
    row_tiles = tl.cdiv(ROWS, BLOCK_R)
    col_tiles = tl.cdiv(COLS, BLOCK_C)
    r0, c0 = _tile_origin(tl.program_id(0), row_tiles, col_tiles, BLOCK_R, BLOCK_C, GROUP_R)
    piece = tl.program_id(1)
    d_begin = piece * split_depth
    row_offs = r0 + tl.arange(0, BLOCK_R)
    col_offs = c0 + tl.arange(0, BLOCK_C)
    rows = (row_offs % ROWS).to(tl.int64)
    cols = (col_offs % COLS).to(tl.int64)
    row_scales = tl.load(a_scale_ptr + rows)
    col_scales = tl.load(b_scale_ptr + cols)
    acc = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    if tl.minimum(tl.min(row_scales, 0), tl.min(col_scales, 0)) > 0:
        low = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
        d_offs = d_begin + tl.arange(0, BLOCK_D)
        a_offs = rows[:, None] * pitch + d_offs[None, :]
        b_offs = cols[None, :] * pitch + d_offs[:, None]
        for _ in range(d_begin, tl.minimum(d_begin + split_depth, pitch), BLOCK_D):
            a_high = tl.load(a_high_ptr + a_offs)
            b_high = tl.load(b_high_ptr + b_offs)
            acc += tl.dot(a_high, b_high) * one
            low = tl.dot(tl.load(a_low_ptr + a_offs), b_high, low)
            low = tl.dot(a_high, tl.load(b_low_ptr + b_offs), low)
            a_offs += BLOCK_D
            b_offs += BLOCK_D
        acc += low * (1.0 / 2048.0)
        larger = tl.maximum(row_scales[:, None], col_scales[None, :])
        acc = acc * larger * tl.minimum(row_scales[:, None], col_scales[None, :])
    else:
        d_end = tl.minimum(d_begin + split_depth, DEPTH)
        for d in range(d_begin, d_end, PLAIN_D):
            depths = (d + tl.arange(0, PLAIN_D)).to(tl.int64)
            mask = depths < d_end
            a_at = a_ptr + rows[:, None] * a_row_stride + depths[None, :] * a_depth_stride
            b_at = b_ptr + cols[None, :] * b_col_stride + depths[:, None] * b_depth_stride
            a = tl.load(a_at, mask=mask[None, :], other=0.0)
            b = tl.load(b_at, mask=mask[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + col_offs, mask=col_offs < COLS, other=0.0)[None, :]
    out_mask = (row_offs < ROWS)[:, None] & (col_offs < COLS)[None, :]
    out_offs = (row_offs + piece * ROWS).to(tl.int64)[:, None] * COLS + col_offs[None, :]
    if pre_ptr is not None:
        tl.store(pre_ptr + out_offs, acc, mask=out_mask)
    tl.store(out_ptr + out_offs, activation(acc, ACTIVATION, MATH), mask=out_mask)
