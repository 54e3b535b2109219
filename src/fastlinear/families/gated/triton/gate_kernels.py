"""Triton kernels over M x H without a product: the gate, and its derivatives.

Where gate and up are interleaved (STEP = 2) a tile of both is read as one and taken apart in
registers, so that accesses stay as wide as elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation, activation_grad
from fastlinear.kernels.triton.sums_kernels import store_sums


@triton.jit
def _load_halves(
    gate_ptr,
    up_ptr,
    rows,
    c0,
    ends,
    row_stride,
    row_mask,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gate and up of a tile of BLOCK_N hidden features from c0 on, in float32; rows have ``ends``
    features, a number or (rows, 1)."""
    if STEP == 2:
        both_cols = 2 * c0 + tl.arange(0, 2 * BLOCK_N)
        mask = row_mask[:, None] & (both_cols[None, :] < 2 * ends)
        offs = rows[:, None] * row_stride + both_cols[None, :]
        both = tl.load(gate_ptr + offs, mask=mask, other=0.0)
        gate, up = tl.split(tl.reshape(both, (rows.shape[0], BLOCK_N, 2)))
    else:
        cols = c0 + tl.arange(0, BLOCK_N)
        mask = row_mask[:, None] & (cols[None, :] < ends)
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
    ends,
    row_stride,
    row_mask,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The reverse of ``_load_halves``."""
    kind = gate_ptr.dtype.element_ty
    if STEP == 2:
        both_cols = 2 * c0 + tl.arange(0, 2 * BLOCK_N)
        mask = row_mask[:, None] & (both_cols[None, :] < 2 * ends)
        offs = rows[:, None] * row_stride + both_cols[None, :]
        both = tl.reshape(tl.join(gate.to(kind), up.to(kind)), (rows.shape[0], 2 * BLOCK_N))
        tl.store(gate_ptr + offs, both, mask=mask)
    else:
        cols = c0 + tl.arange(0, BLOCK_N)
        mask = row_mask[:, None] & (cols[None, :] < ends)
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
def _gate_fwd_tile(
    gate_ptr,
    up_ptr,
    h_ptr,
    rows,
    c0,
    M,
    H,
    ends,
    row_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    gate, up = _load_halves(gate_ptr, up_ptr, rows, c0, ends, row_stride, rows < M, STEP, BLOCK_N)
    h = activation(gate, ACTIVATION, MATH) * up
    cols = c0 + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols[None, :] < ends)
    tl.store(h_ptr + rows[:, None] * H + cols[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_fwd_kernel(
    gate_ptr,
    up_ptr,
    h_ptr,
    M,
    units,
    last,
    col_tiles,
    row_stride,
    UNIT: tl.constexpr,
    DENSE: tl.constexpr,
    CUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes h = act(gate) up on BLOCK_M rows by BLOCK_N hidden features.

    h is (M, H), dense, and may be the gate, H = units UNIT; gate and up have row_stride, unless
    DENSE, and features STEP apart. CUT: the last row has ``last`` features. It is apart, as where
    it ends hides from the compiler how aligned masks are.
    """
    H = units * UNIT
    if DENSE:
        row_stride = STEP * H
    tile = tl.program_id(0)
    row = (tile // col_tiles) * BLOCK_M
    rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    c0 = (tile % col_tiles) * BLOCK_N
    given = gate_ptr, up_ptr, h_ptr, rows, c0, M, H
    if CUT and row + BLOCK_M >= M:
        ends = tl.where(rows < M - 1, H, last)[:, None]
        _gate_fwd_tile(*given, ends, row_stride, ACTIVATION, MATH, STEP, BLOCK_N)
    else:
        _gate_fwd_tile(*given, H, row_stride, ACTIVATION, MATH, STEP, BLOCK_N)


@triton.jit
def _gate_bwd_tile(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    h_ptr,
    rows,
    c0,
    row_mask,
    H,
    ends,
    row_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    FROM_OUT: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(dgate, dup) of a tile in float32; they and h are written in their own dtype."""
    cols = c0 + tl.arange(0, BLOCK_N)
    mask = row_mask[:, None] & (cols[None, :] < ends)
    dense = rows[:, None] * H + cols[None, :]
    dh = tl.load(dh_ptr + dense, mask=mask, other=0.0).to(tl.float32)
    place = rows, c0, ends, row_stride, row_mask
    gate, up = _load_halves(gate_ptr, up_ptr, *place, STEP, BLOCK_N)
    dgate, dup, h = _gated_grads(dh, gate, up, ACTIVATION, MATH, FROM_OUT)
    _store_halves(dgate_ptr, dup_ptr, dgate, dup, *place, STEP, BLOCK_N)
    if h_ptr is not None:
        tl.store(h_ptr + dense, h.to(h_ptr.dtype.element_ty), mask=mask)
    return dgate, dup


@triton.jit
def _gate_bwd_kernel(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    h_ptr,
    part_ptr,
    scratch_ptr,
    M,
    units,
    last,
    row_stride,
    chunk_rows,
    fold,
    UNIT: tl.constexpr,
    DENSE: tl.constexpr,
    FOLD: tl.constexpr,
    EACH: tl.constexpr,
    CUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    FROM_OUT: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program computes dgate, dup and h on chunk_rows rows by BLOCK_N hidden features.

    dh and h (M, H) are dense, and h may be dh itself, or None; gate, up, dgate and dup have
    row_stride, and features STEP apart; the last two may be the first. ``part_ptr``, when not
    None, takes the chunk's column sums of dgate, and behind those of all chunks the ones of dup,
    before rounding, as ``store_sums`` has them. Others as in ``_gate_fwd_kernel``.
    """
    H = units * UNIT
    if DENSE:
        row_stride = STEP * H
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    c0 = tl.program_id(0) * BLOCK_N
    begin = chunk * chunk_rows
    end = tl.minimum(begin + chunk_rows, M)
    sum_gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    sum_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    whole_end = end
    if CUT and end == M:
        whole_end -= (M - begin - 1) % BLOCK_M + 1
    given = dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, h_ptr
    for row in tl.range(begin, whole_end, BLOCK_M, num_stages=STAGES):
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        place = rows, c0, rows < end, H, H, row_stride
        dgate, dup = _gate_bwd_tile(*given, *place, ACTIVATION, MATH, FROM_OUT, STEP, BLOCK_N)
        if part_ptr is not None:
            sum_gate += dgate
            sum_up += dup
    if CUT and end == M:
        rows = (whole_end + tl.arange(0, BLOCK_M)).to(tl.int64)
        ends = tl.where(rows < M - 1, H, last)[:, None]
        place = rows, c0, rows < M, H, ends, row_stride
        dgate, dup = _gate_bwd_tile(*given, *place, ACTIVATION, MATH, FROM_OUT, STEP, BLOCK_N)
        if part_ptr is not None:
            sum_gate += dgate
            sum_up += dup
    if part_ptr is not None:
        cols = c0 + tl.arange(0, BLOCK_N)
        sums = tl.sum(sum_gate, 0)
        store_sums(part_ptr, scratch_ptr, sums, chunk, cols, H, fold, FOLD, EACH)
        sums = tl.sum(sum_up, 0)
        store_sums(part_ptr, scratch_ptr, sums, chunks + chunk, cols, H, fold, FOLD, EACH)
