"""Triton kernels of experts: the passes between the products.

A slot is a token and one of its k choices, number t k + j. Sorted by expert, slots have places:
``order`` (S,) says which slot lies at a place, ``place`` (S,) where a slot lies, -1 where its
expert has no weight here. Those lie behind all others, and all their results are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation, activation_grad_at
from fastlinear.families.gated.triton.gate_kernels import _load_halves, _store_halves

_INF = tl.constexpr(float("inf"))


@triton.jit
def _expert(index_ptr, slots, mask, first, E):
    """Each slot's expert, counted from the first here: E where that is none of E, E + 1 where
    masked."""
    e = tl.load(index_ptr + slots, mask=mask, other=0).to(tl.int64) - first
    e = tl.where((e >= 0) & (e < E), e, E).to(tl.int32)
    return tl.where(mask, e, E + 1)


@triton.jit
def _sort_kernel(index_ptr, order_ptr, place_ptr, sizes_ptr, S, E, first, BLOCK: tl.constexpr):
    """One program counts the slots of expert e (E + 1 programs; the last: of none here) and writes
    their places, in the order of the slots.

    Each reads all slots twice, BLOCK at a time: once to count those of experts before its own.
    """
    e = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for s0 in range(0, S, BLOCK):
        before += (_expert(index_ptr, s0 + offs, s0 + offs < S, first, E) < e).to(tl.int32)
    begin = tl.sum(before, 0)
    end = begin
    for s0 in range(0, S, BLOCK):
        slots = s0 + offs
        own = _expert(index_ptr, slots, slots < S, first, E) == e
        ones = own.to(tl.int32)
        places = end + tl.cumsum(ones, 0) - ones
        tl.store(order_ptr + places, slots, mask=own)
        tl.store(place_ptr + slots, tl.where(e < E, places, -1), mask=own)
        end += tl.sum(ones, 0)
    if e < E:
        tl.store(sizes_ptr + e, end - begin)


@triton.jit
def _gather_kernel(
    x_ptr,
    order_ptr,
    weight_ptr,
    out_ptr,
    S,
    col_tiles,
    x_row,
    TOP: tl.constexpr,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program copies BLOCK_N features of BLOCK_M places: the rows of their tokens.

    x (T, H) has contiguous rows x_row apart, out (S, H) is dense. ``weight_ptr`` (S,), in the order
    of slots, scales the rows, or is None.
    """
    tile = tl.program_id(0)
    places = ((tile // col_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tile % col_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    slots = tl.load(order_ptr + places, mask=places < S, other=0)
    mask = (places < S)[:, None] & (cols < H)[None, :]
    rows = tl.load(x_ptr + (slots // TOP).to(tl.int64)[:, None] * x_row + cols[None, :], mask=mask)
    if weight_ptr is not None:
        rows = rows.to(tl.float32) * tl.load(weight_ptr + slots).to(tl.float32)[:, None]
    out = out_ptr + places[:, None] * H + cols[None, :]
    tl.store(out, rows.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine_kernel(
    slots_ptr,
    place_ptr,
    weight_ptr,
    out_ptr,
    T,
    col_tiles,
    TOP: tl.constexpr,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program adds up BLOCK_N features of BLOCK_M tokens: the rows of their slots, in order.

    The rows (S, H) and out (T, H) are dense. ``weight_ptr`` (S,) scales the rows, or is None. Slots
    without a place are not read.
    """
    tile = tl.program_id(0)
    tokens = ((tile // col_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tile % col_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < H
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for j in range(TOP):
        slots = tokens * TOP + j
        places = tl.load(place_ptr + slots, mask=tokens < T, other=-1).to(tl.int64)
        here = places >= 0
        ptrs = slots_ptr + places[:, None] * H + cols[None, :]
        row = tl.load(ptrs, mask=here[:, None] & col_mask[None, :], other=0.0).to(tl.float32)
        if weight_ptr is not None:
            row *= tl.load(weight_ptr + slots, mask=here, other=0.0).to(tl.float32)[:, None]
        total += row
    out = out_ptr + tokens[:, None] * H + cols[None, :]
    mask = (tokens < T)[:, None] & col_mask[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr):
    """gate up to LIMIT, up within it on both sides; NaN stays NaN."""
    if LIMIT != _INF:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@triton.jit
def _expert_gate_fwd_kernel(
    gate_ptr,
    up_ptr,
    h_ptr,
    S,
    N,
    col_tiles,
    row_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes h = act(α g) / α (u + offset) on BLOCK_M places by BLOCK_N features.

    h is (S, N), dense; gate and up have row_stride, and features STEP apart.
    """
    tile = tl.program_id(0)
    rows = ((tile // col_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    c0 = (tile % col_tiles) * BLOCK_N
    cols = c0 + tl.arange(0, BLOCK_N)
    mask = rows < S
    gate, up = _load_halves(gate_ptr, up_ptr, rows, c0, N, row_stride, mask, STEP, BLOCK_N)
    gate, up = _clamped(gate, up, LIMIT)
    h = activation(gate * ALPHA, ACTIVATION, MATH) * (1.0 / ALPHA) * (up + OFFSET)
    ptrs = h_ptr + rows[:, None] * N + cols[None, :]
    tl.store(ptrs, h.to(h_ptr.dtype.element_ty), mask=mask[:, None] & (cols < N)[None, :])


@triton.jit
def _expert_gate_bwd_kernel(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    h_ptr,
    order_ptr,
    index_ptr,
    weight_ptr,
    dweight_ptr,
    dy_ptr,
    bias_ptr,
    S,
    N,
    H,
    E,
    first,
    row_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes the gate's derivatives on BLOCK_M places, all N features.

    ``dh_ptr`` (S, N), dense, is dy W_down before the routing weights w. dgate and dup lie as gate
    and up do; h (S, N), which may be dh, becomes w h; dweight (S,), in the order of slots, becomes
    Σ dh h + dy b. Each of these may be None. b is (E, H), or None; dy (S, H) goes with it.
    """
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    mask = rows < S
    slots = tl.load(order_ptr + rows, mask=mask, other=0)
    expert = _expert(index_ptr, slots, mask, first, E)
    owned = expert < E
    weight = tl.load(weight_ptr + slots, mask=owned, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for c0 in range(0, N, BLOCK_N):
        cols = c0 + tl.arange(0, BLOCK_N)
        dense = rows[:, None] * N + cols[None, :]
        inside = owned[:, None] & (cols < N)[None, :]
        dh = tl.load(dh_ptr + dense, mask=inside, other=0.0).to(tl.float32)
        g, u = _load_halves(gate_ptr, up_ptr, rows, c0, N, row_stride, owned, STEP, BLOCK_N)
        gate, up = _clamped(g, u, LIMIT)
        out = activation(gate * ALPHA, ACTIVATION, MATH) * (1.0 / ALPHA)
        h = out * (up + OFFSET)
        if dweight_ptr is not None:
            total += dh * h
        if h_ptr is not None:
            to = mask[:, None] & (cols < N)[None, :]
            tl.store(h_ptr + dense, (weight * h).to(h_ptr.dtype.element_ty), mask=to)
        if dgate_ptr is not None:
            dh *= weight
            dgate = activation_grad_at(dh * (up + OFFSET), gate * ALPHA, ACTIVATION, MATH)
            dup = dh * out
            if LIMIT != _INF:
                dgate = tl.where(g <= LIMIT, dgate, 0.0)
                dup = tl.where((u >= -LIMIT) & (u <= LIMIT), dup, 0.0)
            _store_halves(
                dgate_ptr, dup_ptr, dgate, dup, rows, c0, N, row_stride, mask, STEP, BLOCK_N
            )
    if dweight_ptr is not None:
        if bias_ptr is not None:
            for c0 in range(0, H, BLOCK_N):
                cols = c0 + tl.arange(0, BLOCK_N)
                inside = owned[:, None] & (cols < H)[None, :]
                dy = tl.load(dy_ptr + rows[:, None] * H + cols[None, :], mask=inside, other=0.0)
                at = bias_ptr + expert.to(tl.int64)[:, None] * H + cols[None, :]
                bias = tl.load(at, mask=inside, other=0.0)
                total += dy.to(tl.float32) * bias.to(tl.float32)
        found = tl.sum(total, 1)
        tl.store(dweight_ptr + slots, found.to(dweight_ptr.dtype.element_ty), mask=mask)
