"""Triton kernels of grouped_linear's products: y = act(x Wᵀ + b), and dx = dpre W.

How strides are given, and what a tile is, stands in tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation
from fastlinear.families.grouped.triton.tiles import (
    _dot,
    _is_positive,
    _load,
    _load_matrix,
    _mask,
    _place,
    _signs,
    _stride,
)


@triton.jit
def _resident_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    pre_ptr,
    B,
    L,
    batch_tiles,
    tiles,
    program_tiles,
    col_tiles,
    x_batch,
    x_row,
    x_group,
    x_col,
    w_group,
    w_row,
    w_col,
    y_batch,
    y_row,
    y_group,
    y_col,
    s_batch,
    s_row,
    s_group,
    s_col,
    X_ALIGN: tl.constexpr,
    X_UNIT: tl.constexpr,
    X_FIXED: tl.constexpr,
    W_ALIGN: tl.constexpr,
    W_UNIT: tl.constexpr,
    W_FIXED: tl.constexpr,
    Y_ALIGN: tl.constexpr,
    Y_UNIT: tl.constexpr,
    Y_FIXED: tl.constexpr,
    S_ALIGN: tl.constexpr,
    S_UNIT: tl.constexpr,
    S_FIXED: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    ACROSS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = act(x Wᵀ + b) on program_tiles tiles of one group and BLOCK_N outputs.

    W stays on the chip while x streams by. K is cut into up to three parts K0, K1, K2 (0: none),
    powers of two that reach or pass K together, so that 100 inputs cost 112 and not 128. W is
    (G, N, K) with any strides. ``bias_ptr`` (G, N), contiguous, and ``pre_ptr`` may be None; the
    latter is the pre-activation, as y, or takes its signs, bytes (B, L, G, units) of any strides,
    as ``_signs`` packs them. EARLY: the kernel before may still run.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    g = (tl.program_id(0) // col_tiles).to(tl.int64)
    n0 = (tl.program_id(0) % col_tiles) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    n_mask = n < N

    w_n = _stride(w_row, W_ALIGN, W_UNIT == "row")
    w_k = _stride(w_col, W_ALIGN, W_UNIT == "col")
    w_base = w_ptr + g * (w_group * W_ALIGN)
    w0 = _load_matrix(w_base, w_k, w_n, 0, n0, K, N, K0, BLOCK_N)
    if K1 > 0:
        w1 = _load_matrix(w_base, w_k, w_n, K0, n0, K, N, K1, BLOCK_N)
    if K2 > 0:
        w2 = _load_matrix(w_base, w_k, w_n, K0 + K1, n0, K, N, K2, BLOCK_N)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + g * N + n, mask=n_mask, other=0.0).to(tl.float32)

    x_base = x_ptr + g * (x_group * X_ALIGN)
    x_k = _stride(x_col, X_ALIGN, X_UNIT == "col")
    y_base = g * (y_group * Y_ALIGN)
    y_cols = n * _stride(y_col, Y_ALIGN, Y_UNIT == "col")
    SIGNS: tl.constexpr = pre_ptr is not None and pre_ptr.dtype.element_ty == tl.uint8
    if SIGNS:
        UNITS: tl.constexpr = (N + 31) // 32 * 4
        units = n0 // 8 + tl.arange(0, BLOCK_N // 8)
        s_base = g * (s_group * S_ALIGN)
        s_units = units * _stride(s_col, S_ALIGN, S_UNIT == "col")
    begin = tl.program_id(1) * program_tiles
    for tile in tl.range(begin, tl.minimum(begin + program_tiles, tiles), num_stages=STAGES):
        mask = _mask(tile, B, L, batch_tiles, BLOCK_M, ACROSS)
        first, rows = _place(
            tile, L, batch_tiles, x_batch, x_row, X_ALIGN, X_UNIT, X_FIXED, BLOCK_M, ACROSS
        )
        x = x_base + first
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc = _dot(_load(x, rows, mask, x_k, 0, K, K0), w0, acc, PRECISION, UPCAST)
        if K1 > 0:
            acc = _dot(_load(x, rows, mask, x_k, K0, K, K1), w1, acc, PRECISION, UPCAST)
        if K2 > 0:
            x2 = _load(x, rows, mask, x_k, K0 + K1, K, K2)
            acc = _dot(x2, w2, acc, PRECISION, UPCAST)
        if bias_ptr is not None:
            acc += bias[None, :]
        first, rows = _place(
            tile, L, batch_tiles, y_batch, y_row, Y_ALIGN, Y_UNIT, Y_FIXED, BLOCK_M, ACROSS
        )
        y_offs = rows[:, None] + y_cols[None, :]
        y_mask = mask[:, None] & n_mask[None, :]
        if pre_ptr is not None and not SIGNS:
            pre = acc.to(pre_ptr.dtype.element_ty)
            tl.store(pre_ptr + y_base + first + y_offs, pre, mask=y_mask)
        acc = activation(acc, ACTIVATION, MATH)
        y = acc.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + y_base + first + y_offs, y, mask=y_mask)
        if SIGNS:
            first, rows = _place(
                tile, L, batch_tiles, s_batch, s_row, S_ALIGN, S_UNIT, S_FIXED, BLOCK_M, ACROSS
            )
            sign_mask = _signs(_is_positive(y, ACTIVATION), BLOCK_M, BLOCK_N)
            ptrs = pre_ptr + s_base + first + rows[:, None] + s_units[None, :]
            tl.store(ptrs, sign_mask, mask=mask[:, None] & (units < UNITS)[None, :])
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _streaming_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    pre_ptr,
    B,
    L,
    batch_tiles,
    col_tiles,
    x_batch,
    x_row,
    x_group,
    x_col,
    w_group,
    w_row,
    w_col,
    y_batch,
    y_row,
    y_group,
    y_col,
    X_ALIGN: tl.constexpr,
    X_UNIT: tl.constexpr,
    X_FIXED: tl.constexpr,
    W_ALIGN: tl.constexpr,
    W_UNIT: tl.constexpr,
    W_FIXED: tl.constexpr,
    Y_ALIGN: tl.constexpr,
    Y_UNIT: tl.constexpr,
    Y_FIXED: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    ACROSS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """y = act(x Wᵀ + b) on one tile of one group and BLOCK_N outputs; x and W stream by.

    Arguments as of ``_resident_kernel``.
    """
    g = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) // col_tiles
    n = (tl.program_id(0) % col_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    mask = _mask(tile, B, L, batch_tiles, BLOCK_M, ACROSS)
    k = tl.arange(0, BLOCK_K)
    x_k = _stride(x_col, X_ALIGN, X_UNIT == "col")
    w_k = _stride(w_col, W_ALIGN, W_UNIT == "col")
    first, rows = _place(
        tile, L, batch_tiles, x_batch, x_row, X_ALIGN, X_UNIT, X_FIXED, BLOCK_M, ACROSS
    )
    x_ptrs = x_ptr + g * (x_group * X_ALIGN) + first + rows[:, None] + (k * x_k)[None, :]
    w_rows = n * _stride(w_row, W_ALIGN, W_UNIT == "row")
    w_ptrs = w_ptr + g * (w_group * W_ALIGN) + (k * w_k)[:, None] + w_rows[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs, mask=mask[:, None], other=0.0)
            w = tl.load(w_ptrs, mask=n_mask[None, :], other=0.0)
        else:
            k_mask = k < K - begin
            x = tl.load(x_ptrs, mask=mask[:, None] & k_mask[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
        acc = _dot(x, w, acc, PRECISION, UPCAST)
        x_ptrs += BLOCK_K * x_k
        w_ptrs += BLOCK_K * w_k
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + g * N + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    first, rows = _place(
        tile, L, batch_tiles, y_batch, y_row, Y_ALIGN, Y_UNIT, Y_FIXED, BLOCK_M, ACROSS
    )
    first += g * (y_group * Y_ALIGN)
    y_offs = rows[:, None] + (n * _stride(y_col, Y_ALIGN, Y_UNIT == "col"))[None, :]
    y_mask = mask[:, None] & n_mask[None, :]
    if pre_ptr is not None:
        tl.store(pre_ptr + first + y_offs, acc.to(pre_ptr.dtype.element_ty), mask=y_mask)
    acc = activation(acc, ACTIVATION, MATH)
    tl.store(y_ptr + first + y_offs, acc.to(y_ptr.dtype.element_ty), mask=y_mask)


@triton.jit
def _copy_tokens_kernel(
    t_ptr,
    out_ptr,
    L,
    G,
    D,
    E,
    stride_tb,
    stride_tl,
    stride_tg,
    stride_td,
    stride_ob,
    stride_ol,
    stride_og,
    stride_oe,
    BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program moves a tile of (L, D) of one batch and group, zeros from column D on."""
    across = tl.cdiv(E, BLOCK_E)
    down = tl.cdiv(L, BLOCK_L)
    program = tl.program_id(0)
    rest = program // across
    e = program % across * BLOCK_E + tl.arange(0, BLOCK_E)
    tokens = rest % down * BLOCK_L + tl.arange(0, BLOCK_L)
    group = (rest // down % G).to(tl.int64)
    batch = (rest // down // G).to(tl.int64)
    rows = tokens.to(tl.int64)[:, None]
    columns = e.to(tl.int64)[None, :]
    inside = (tokens < L)[:, None]
    t_ptr += batch * stride_tb + group * stride_tg
    out_ptr += batch * stride_ob + group * stride_og
    read = t_ptr + rows * stride_tl + columns * stride_td
    value = tl.load(read, mask=inside & (e < D)[None, :], other=0.0)
    tl.store(
        out_ptr + rows * stride_ol + columns * stride_oe, value, mask=inside & (e < E)[None, :]
    )
