"""Triton kernels over M x H without a product: the gate, and its derivatives.

Where gate and up are interleaved (STEP = 2) a tile of both is read as one and taken apart in
registers, so that accesses stay as wide as elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation, activation_grad


@triton.jit
def _load_halves(
    gate_ptr, up_ptr, rows, c0, H, row_stride, row_mask, STEP: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Gate and up of a tile of BLOCK_N hidden features from c0 on, in float32."""
    if STEP == 2:
        both_cols = 2 * c0 + tl.arange(0, 2 * BLOCK_N)
        mask = row_mask[:, None] & (both_cols < 2 * H)[None, :]
        offs = rows[:, None] * row_stride + both_cols[None, :]
        both = tl.load(gate_ptr + offs, mask=mask, other=0.0)
        gate, up = tl.split(tl.reshape(both, (rows.shape[0], BLOCK_N, 2)))
    else:
        cols = c0 + tl.arange(0, BLOCK_N)
        mask = row_mask[:, None] & (cols < H)[None, :]
        offs = rows[:, None] * row_stride + cols[None, :]
        gate = tl.load(gate_ptr + offs, mask=mask, other=0.0)
        up = tl.load(up_ptr + offs, mask=mask, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store_halves(
    gate_ptr,
    up_ptr,
    gate,
    up,
    rows,
    c0,
    H,
    row_stride,
    row_mask,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The reverse of ``_load_halves``."""
    kind = gate_ptr.dtype.element_ty
    if STEP == 2:
        both_cols = 2 * c0 + tl.arange(0, 2 * BLOCK_N)
        mask = row_mask[:, None] & (both_cols < 2 * H)[None, :]
        offs = rows[:, None] * row_stride + both_cols[None, :]
        both = tl.reshape(tl.join(gate.to(kind), up.to(kind)), (rows.shape[0], 2 * BLOCK_N))
        tl.store(gate_ptr + offs, both, mask=mask)
    else:
        cols = c0 + tl.arange(0, BLOCK_N)
        mask = row_mask[:, None] & (cols < H)[None, :]
        offs = rows[:, None] * row_stride + cols[None, :]
        tl.store(gate_ptr + offs, gate.to(kind), mask=mask)
        tl.store(up_ptr + offs, up.to(kind), mask=mask)


@triton.jit
def _gated_grads(
    dh, gate, up, ACTIVATION: tl.constexpr, MATH: tl.constexpr, FROM_OUT: tl.constexpr
):
    """(dgate, dup, h) in float32. FROM_OUT: the derivative is formed from the gate's output."""
    out = activation(gate, ACTIVATION, MATH)
    if FROM_OUT:
        dgate = activation_grad(dh * up, out, ACTIVATION, MATH)
    else:
        dgate = activation_grad(dh * up, gate, ACTIVATION, MATH)
    return dgate, dh * out, out * up


@triton.jit
def _gate_fwd_kernel(
    gate_ptr,
    up_ptr,
    h_ptr,
    M,
    H,
    col_tiles,
    row_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes h = act(gate) up on BLOCK_M rows by BLOCK_N hidden features.

    h is (M, H), dense, and may be the gate; gate and up have row_stride, and features STEP apart.
    """
    tile = tl.program_id(0)
    rows = ((tile // col_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    c0 = (tile % col_tiles) * BLOCK_N
    cols = c0 + tl.arange(0, BLOCK_N)
    row_mask = rows < M
    gate, up = _load_halves(gate_ptr, up_ptr, rows, c0, H, row_stride, row_mask, STEP, BLOCK_N)
    h = activation(gate, ACTIVATION, MATH) * up
    mask = row_mask[:, None] & (cols < H)[None, :]
    tl.store(h_ptr + rows[:, None] * H + cols[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_bwd_kernel(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    h_ptr,
    part_ptr,
    M,
    H,
    row_stride,
    chunk_rows,
    part_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    FROM_OUT: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes dgate, dup and h on chunk_rows rows by BLOCK_N hidden features.

    dh and h (M, H) are dense, and h may be dh itself, or None; gate, up, dgate and dup have
    row_stride, and features STEP apart; the last two may be the first. ``part_ptr``, when not
    None, is (2, chunks, H) in float32 and takes the chunk's column sums of dgate and dup before
    rounding; part_stride is chunks H.
    """
    chunk = tl.program_id(1)
    c0 = tl.program_id(0) * BLOCK_N
    cols = c0 + tl.arange(0, BLOCK_N)
    begin = chunk * chunk_rows
    end = tl.minimum(begin + chunk_rows, M)
    sum_gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    sum_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for row in range(begin, end, BLOCK_M):
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        row_mask = rows < end
        mask = row_mask[:, None] & (cols < H)[None, :]
        dense = rows[:, None] * H + cols[None, :]
        dh = tl.load(dh_ptr + dense, mask=mask, other=0.0).to(tl.float32)
        gate, up = _load_halves(gate_ptr, up_ptr, rows, c0, H, row_stride, row_mask, STEP, BLOCK_N)
        dgate, dup, h = _gated_grads(dh, gate, up, ACTIVATION, MATH, FROM_OUT)
        _store_halves(
            dgate_ptr, dup_ptr, dgate, dup, rows, c0, H, row_stride, row_mask, STEP, BLOCK_N
        )
        if h_ptr is not None:
            tl.store(h_ptr + dense, h.to(h_ptr.dtype.element_ty), mask=mask)
        if part_ptr is not None:
            sum_gate += dgate
            sum_up += dup
    if part_ptr is not None:
        to = part_ptr + chunk.to(tl.int64) * H + cols
        tl.store(to, tl.sum(sum_gate, 0), mask=cols < H)
        tl.store(to + part_stride, tl.sum(sum_up, 0), mask=cols < H)
