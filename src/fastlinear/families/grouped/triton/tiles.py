"""Triton device functions of grouped_linear: where tokens lie, loads and products.

Tensors of tokens are (B, L, G, features) with any strides, given as ``<name>_batch``, ``_row``,
``_group`` and ``_col``. A stride is a count of ``<NAME>_ALIGN`` elements, but for the one that
``<NAME>_UNIT`` names ("row", "col" or ""), which is 1: so the compiler knows how wide it may load
where rows are aligned to 8 bytes only, as those of 100 bfloat16 numbers are. ``<NAME>_FIXED`` is
the row stride once more, 0 if unknown when compiling: known, addresses take few registers.

A tile is BLOCK_M tokens of one group. Where ACROSS, tiles run over all B·L tokens (L is small),
else each lies within one batch entry. All products accumulate in float32, deterministically.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stride(count, ALIGN: tl.constexpr, IS_UNIT: tl.constexpr):
    """A stride in elements."""
    if IS_UNIT:
        return 1
    else:  # noqa: RET505 - Triton goes on compiling after a taken compile-time branch
        return count * ALIGN


@triton.jit
def _mask(tile, B, L, batch_tiles, BLOCK_M: tl.constexpr, ACROSS: tl.constexpr):
    """Which tokens of a tile exist."""
    if ACROSS:
        return tile * BLOCK_M + tl.arange(0, BLOCK_M) < B * L
    else:  # noqa: RET505
        return (tile % batch_tiles) * BLOCK_M + tl.arange(0, BLOCK_M) < L


@triton.jit
def _place(
    tile,
    L,
    batch_tiles,
    batch_stride,
    row_stride,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Where a tile begins, in elements from the group's first, and its tokens from there."""
    if FIXED > 0:
        row = FIXED
    else:
        row = _stride(row_stride, ALIGN, UNIT == "row")
    if ACROSS:
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        first = 0
        rows = (m // L).to(tl.int64) * (batch_stride * ALIGN) + (m % L).to(tl.int64) * row
    else:
        batch = (tile // batch_tiles).to(tl.int64) * batch_stride * ALIGN
        first = batch + ((tile % batch_tiles) * BLOCK_M).to(tl.int64) * row
        rows = tl.arange(0, BLOCK_M) * row
    return first, rows


@triton.jit
def _load(
    ptr, rows, row_mask, col_stride, FIRST: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr
):
    """Columns FIRST to FIRST + BLOCK of the rows that begin at ``rows``; 0 from COLS on."""
    cols = FIRST + tl.arange(0, BLOCK)
    ptrs = ptr + rows[:, None] + cols[None, :] * col_stride
    if FIRST + BLOCK <= COLS:
        mask = row_mask[:, None]
    else:
        mask = row_mask[:, None] & (cols < COLS)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _load_signs(
    ptr,
    rows,
    row_mask,
    col_stride,
    COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whether each of COLS <= BLOCK outputs is positive, by the bits that ``_signs`` packs."""
    units = tl.arange(0, BLOCK // 8)
    ptrs = ptr + rows[:, None] + (units * col_stride)[None, :]
    mask = row_mask[:, None] & (units < (COLS + 31) // 32 * 4)[None, :]
    found = tl.reshape(tl.load(ptrs, mask=mask, other=0), (BLOCK_M, BLOCK // 32, 1, 4, 1))
    pairs = 2 * tl.arange(0, 4)[None, None, :, None, None]
    places = (pairs + tl.arange(0, 2)[None, None, None, None, :]).to(tl.uint8)
    return tl.reshape((found >> places) & 1, (BLOCK_M, BLOCK)) != 0


@triton.jit
def _is_positive(y, ACTIVATION: tl.constexpr):
    """Whether the activation's derivative is 1 there; of relu's NaN it is."""
    if ACTIVATION == "relu":
        return (y <= 0) == 0
    else:  # noqa: RET505
        return y > 0


@triton.jit
def _signs(positive, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_M, BLOCK_N) of one bit each as bytes (BLOCK_M, BLOCK_N / 8).

    Unit 4 i + q has bit 2 j + e of output 32 i + 8 j + 2 q + e: those that a lane holds of a
    product, so that packing them asks no other.
    """
    bits = tl.reshape(positive.to(tl.int32), (BLOCK_M, BLOCK_N // 32, 4, 4, 2))
    bits = tl.sum(bits << tl.arange(0, 2)[None, None, None, None, :], axis=4)
    bits = tl.sum(bits << (2 * tl.arange(0, 4))[None, None, :, None], axis=2)
    return tl.reshape(bits, (BLOCK_M, BLOCK_N // 8)).to(tl.uint8)


@triton.jit
def _load_matrix(
    ptr,
    row_stride,
    col_stride,
    first_row,
    first_col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Rows from first_row and columns from first_col of a matrix (ROWS, COLS); 0 outside."""
    rows = first_row + tl.arange(0, BLOCK_R)
    cols = first_col + tl.arange(0, BLOCK_C)
    ptrs = ptr + rows[:, None] * row_stride + cols[None, :] * col_stride
    return tl.load(ptrs, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a b; UPCAST multiplies in float32 (the CPU interpreter has no bfloat16).

    One column is a sum, which adds up in pairs: as accurate as PyTorch's sum of one output, where
    tensor cores add one after the other.
    """
    if b.shape[1] == 1:
        column = tl.sum(b.to(tl.float32), axis=1)  # the numbers themselves, as a row lies
        return acc + tl.sum(a.to(tl.float32) * column[None, :], axis=1, keep_dims=True)
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
