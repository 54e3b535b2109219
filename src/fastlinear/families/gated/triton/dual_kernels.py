"""Triton kernels of gated_mlp whose products hold the gate in their epilogue.

Operands have any strides; accumulation is in float32, and deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation
from fastlinear.families.gated.triton.gate_kernels import (
    _gated_grads,
    _load_halves,
    _store_halves,
)
from fastlinear.families.linear.triton.gemm import _tile_origin


@triton.jit
def _dual_fwd_kernel(
    x_ptr,
    gate_w_ptr,
    up_w_ptr,
    gate_b_ptr,
    up_b_ptr,
    h_ptr,
    gate_ptr,
    up_ptr,
    M,
    H,
    K,
    x_row_stride,
    x_col_stride,
    w_row_stride,
    w_col_stride,
    pre_row_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program computes h = act(x Wgᵀ + bg) (x Wuᵀ + bu) on one tile: one tile of x feeds both.

    Both weights are (H, K) of the same strides; biases (H,) or None; h (M, H), dense. ``gate_ptr``
    and ``up_ptr``, when not None, take the pre-activations, with pre_row_stride and features STEP
    apart. UPCAST multiplies in float32 (the CPU interpreter has no 16-bit products).
    """
    row_tiles = tl.cdiv(M, BLOCK_M)
    col_tiles = tl.cdiv(H, BLOCK_N)
    r0, c0 = _tile_origin(tl.program_id(0), row_tiles, col_tiles, BLOCK_M, BLOCK_N, GROUP_M)
    row_offs = r0 + tl.arange(0, BLOCK_M)
    col_offs = c0 + tl.arange(0, BLOCK_N)
    k_offs = tl.arange(0, BLOCK_K)
    # Rows and columns past the end wrap to valid memory; they are masked when stored.
    x_rows = (row_offs % M).to(tl.int64)
    w_rows = (col_offs % H).to(tl.int64)
    x_ptrs = x_ptr + x_rows[:, None] * x_row_stride + k_offs.to(tl.int64)[None, :] * x_col_stride
    w_offs = k_offs.to(tl.int64)[:, None] * w_col_stride + w_rows[None, :] * w_row_stride
    gate_ptrs = gate_w_ptr + w_offs
    up_ptrs = up_w_ptr + w_offs
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            wg = tl.load(gate_ptrs)
            wu = tl.load(up_ptrs)
        else:
            k_mask = k_offs < K - k
            x = tl.load(x_ptrs, mask=k_mask[None, :], other=0.0)
            wg = tl.load(gate_ptrs, mask=k_mask[:, None], other=0.0)
            wu = tl.load(up_ptrs, mask=k_mask[:, None], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            wg = wg.to(tl.float32)
            wu = wu.to(tl.float32)
        gate = tl.dot(x, wg, gate)
        up = tl.dot(x, wu, up)
        x_ptrs += BLOCK_K * x_col_stride
        gate_ptrs += BLOCK_K * w_col_stride
        up_ptrs += BLOCK_K * w_col_stride
    col_mask = col_offs < H
    if gate_b_ptr is not None:
        gate += tl.load(gate_b_ptr + col_offs, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    if up_b_ptr is not None:
        up += tl.load(up_b_ptr + col_offs, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    rows = row_offs.to(tl.int64)
    row_mask = row_offs < M
    if gate_ptr is not None:
        _store_halves(
            gate_ptr,
            up_ptr,
            gate,
            up,
            rows,
            c0,
            H,
            pre_row_stride,
            row_mask,
            STEP,
            BLOCK_N,
        )
    h = activation(gate, ACTIVATION, MATH) * up
    mask = row_mask[:, None] & col_mask[None, :]
    tl.store(h_ptr + rows[:, None] * H + col_offs[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _down_bwd_kernel(
    dy_ptr,
    w_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    h_ptr,
    part_ptr,
    M,
    H,
    N,
    dy_row_stride,
    w_row_stride,
    w_col_stride,
    pre_row_stride,
    part_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    FROM_OUT: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program computes a tile of dh = dy Wd, and from it dgate, dup and h; dh is never written.

    dy is (M, N), unit stride along N; Wd (N, H) of any strides; gate, up, dgate and dup have
    pre_row_stride, and features STEP apart, and the last two may be gate and up, which a tile reads
    first; h (M, H), dense, or None. ``part_ptr``, when not None, is (2, row tiles, H) in float32
    and takes the tile's column sums of dgate and dup; part_stride is row tiles H.
    """
    row_tiles = tl.cdiv(M, BLOCK_M)
    col_tiles = tl.cdiv(H, BLOCK_N)
    r0, c0 = _tile_origin(tl.program_id(0), row_tiles, col_tiles, BLOCK_M, BLOCK_N, GROUP_M)
    row_offs = r0 + tl.arange(0, BLOCK_M)
    col_offs = c0 + tl.arange(0, BLOCK_N)
    n_offs = tl.arange(0, BLOCK_K)
    dy_rows = (row_offs % M).to(tl.int64)
    w_cols = (col_offs % H).to(tl.int64)
    dy_ptrs = dy_ptr + dy_rows[:, None] * dy_row_stride + n_offs[None, :]
    w_ptrs = w_ptr + n_offs.to(tl.int64)[:, None] * w_row_stride + w_cols[None, :] * w_col_stride
    dh = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for n in range(0, N, BLOCK_K):
        if EVEN_N:
            dy = tl.load(dy_ptrs)
            w = tl.load(w_ptrs)
        else:
            n_mask = n_offs < N - n
            dy = tl.load(dy_ptrs, mask=n_mask[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=n_mask[:, None], other=0.0)
        if UPCAST:
            dy = dy.to(tl.float32)
            w = w.to(tl.float32)
        dh = tl.dot(dy, w, dh)
        dy_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * w_row_stride
    # The gradients of half a tile at a time: all of it at once would not stay in registers.
    halves = tl.split(tl.permute(tl.reshape(dh, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
    for half in tl.static_range(2):
        _store_gradients(
            halves[half],
            gate_ptr,
            up_ptr,
            dgate_ptr,
            dup_ptr,
            h_ptr,
            part_ptr,
            r0,
            c0 + half * (BLOCK_N // 2),
            M,
            H,
            pre_row_stride,
            part_stride,
            ACTIVATION,
            MATH,
            FROM_OUT,
            STEP,
            BLOCK_M,
            BLOCK_N // 2,
        )


@triton.jit
def _store_gradients(
    dh,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    h_ptr,
    part_ptr,
    r0,
    c0,
    M,
    H,
    pre_row_stride,
    part_stride,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    FROM_OUT: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dgate, dup and h of a tile of dh at (r0, c0), and its column sums: ``_down_bwd_kernel``."""
    row_offs = r0 + tl.arange(0, BLOCK_M)
    col_offs = c0 + tl.arange(0, BLOCK_N)
    rows = row_offs.to(tl.int64)
    row_mask = row_offs < M
    gate, up = _load_halves(gate_ptr, up_ptr, rows, c0, H, pre_row_stride, row_mask, STEP, BLOCK_N)
    dgate, dup, h = _gated_grads(dh, gate, up, ACTIVATION, MATH, FROM_OUT)
    _store_halves(
        dgate_ptr,
        dup_ptr,
        dgate,
        dup,
        rows,
        c0,
        H,
        pre_row_stride,
        row_mask,
        STEP,
        BLOCK_N,
    )
    col_mask = col_offs < H
    if h_ptr is not None:
        mask = row_mask[:, None] & col_mask[None, :]
        h_ptrs = h_ptr + rows[:, None] * H + col_offs[None, :]
        tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=mask)
    if part_ptr is not None:
        # rows past the end wrapped to others: they do not count twice
        to = part_ptr + (r0 // BLOCK_M).to(tl.int64) * H + col_offs
        sums = tl.sum(tl.where(row_mask[:, None], dgate, 0.0), 0)
        tl.store(to, sums, mask=col_mask)
        sums = tl.sum(tl.where(row_mask[:, None], dup, 0.0), 0)
        tl.store(to + part_stride, sums, mask=col_mask)
