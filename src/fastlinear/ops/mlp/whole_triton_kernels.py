"""Triton kernels of backend ``whole``: a chain of narrow Linears without leaving the chip.

Layer i maps (M, WIDTHS[i]) to (M, WIDTHS[i + 1]); BLOCKS are the widths padded to powers of two of
at least 16. Weights are (N, K) contiguous and are padded with zeros as they are loaded, so padded
columns never reach a result; they are set to zero where a non-finite value could cross. Layers are
unrolled, so tensors of one kind arrive as a tuple with one entry per layer.

All kernels accumulate in float32 and are deterministic. UPCAST multiplies in float32 (the CPU
interpreter has no bfloat16). SCHEMES holds the scheme of each layer's float32 product: 0 plain
float32, 1 one TF32 product of operands rounded here (the unit itself truncates), 2 three of them.
"""

# ruff: noqa: RET505 - Triton goes on compiling after a taken compile-time branch, so every choice
# must be an if/elif/else chain.
from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.ops.common.activations_triton import activation, activation_grad


@triton.jit
def _operand(t, SCHEME: tl.constexpr, UPCAST: tl.constexpr):
    """A product's operand: rounded to nearest TF32 for scheme 1, otherwise as it is."""
    if UPCAST:
        return t.to(tl.float32)
    elif SCHEME == 1 and t.dtype == tl.float32:
        bits = t.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(t == t, rounded, t)
    else:
        return t


@triton.jit
def _dot(a, b, acc, SCHEME: tl.constexpr):
    """acc + a @ b by the scheme; ``acc`` may be None."""
    if SCHEME == 0:
        return tl.dot(a, b, acc, input_precision="ieee")
    elif SCHEME == 1:
        return tl.dot(a, b, acc, input_precision="tf32")
    else:
        return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _load_weight(
    w_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCHEME: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A weight (N, K), padded with zeros to (BLOCK_N, BLOCK_K)."""
    n_offs = tl.arange(0, BLOCK_N)[:, None]
    k_offs = tl.arange(0, BLOCK_K)[None, :]
    w_ptrs = w_ptr + n_offs * K + k_offs
    if N == BLOCK_N and K == BLOCK_K:
        w = tl.load(w_ptrs)
    else:
        w = tl.load(w_ptrs, mask=(n_offs < N) & (k_offs < K), other=0.0)
    return _operand(w, SCHEME, UPCAST)


@triton.jit
def _load_rows(
    ptr, row_offs, row_stride, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Rows (BLOCK_M, BLOCK_N) of a (M, N) matrix with unit column stride; zeros outside of it."""
    offs = tl.arange(0, BLOCK_N)
    ptrs = ptr + row_offs.to(tl.int64)[:, None] * row_stride + offs[None, :]
    mask = row_offs[:, None] < M
    if N != BLOCK_N:
        mask = mask & (offs[None, :] < N)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _store_rows(
    ptr, values, row_offs, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Store (BLOCK_M, BLOCK_N) into the rows of a contiguous (M, N) matrix."""
    offs = tl.arange(0, BLOCK_N)
    ptrs = ptr + row_offs.to(tl.int64)[:, None] * N + offs[None, :]
    mask = row_offs[:, None] < M
    if N != BLOCK_N:
        mask = mask & (offs[None, :] < N)
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _clear_padding(values, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zero the columns from N on: a NaN or an infinity there would spread through the product."""
    if N == BLOCK_N:
        return values
    else:
        return tl.where(tl.arange(0, BLOCK_N)[None, :] < N, values, 0.0)


@triton.jit
def _fwd_rows(
    row_block,
    weights,
    x_ptr,
    weight_ptrs,
    bias_ptrs,
    y_ptr,
    saved_ptrs,
    M,
    x_row_stride,
    LAYERS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCHEMES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    SAVE_FINAL_PRE: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    AHEAD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """All layers for BLOCK_M rows. ``weights`` holds the first of them, already loaded."""
    row_offs = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    h = _load_rows(x_ptr, row_offs, x_row_stride, M, WIDTHS[0], BLOCK_M, BLOCKS[0])
    for i in tl.static_range(LAYERS):
        for j in tl.static_range(LAYERS):
            if j >= len(weights) and j <= i + AHEAD:
                w = _load_weight(
                    *(weight_ptrs[j], WIDTHS[j + 1], WIDTHS[j], BLOCKS[j + 1], BLOCKS[j]),
                    *(SCHEMES[j], UPCAST),
                )
                weights = weights + (w,)
        h = _operand(h, SCHEMES[i], UPCAST)
        acc = _dot(h, tl.trans(weights[i]), None, SCHEMES[i])
        if bias_ptrs[i] is not None:
            offs = tl.arange(0, BLOCKS[i + 1])
            bias = tl.load(bias_ptrs[i] + offs, mask=offs < WIDTHS[i + 1], other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if i + 1 < LAYERS:
            out = activation(acc, ACTIVATION, MATH)
            out = _clear_padding(out, WIDTHS[i + 1], BLOCKS[i + 1])
        else:
            out = activation(acc, FINAL, MATH)
        if saved_ptrs[i] is not None:
            kept = acc if (SAVE_PRE if i + 1 < LAYERS else SAVE_FINAL_PRE) else out
            _store_rows(saved_ptrs[i], kept, row_offs, M, WIDTHS[i + 1], BLOCK_M, BLOCKS[i + 1])
        h = out if UPCAST else out.to(x_ptr.dtype.element_ty)
    _store_rows(y_ptr, h, row_offs, M, WIDTHS[LAYERS], BLOCK_M, BLOCKS[LAYERS])


@triton.jit
def _mlp_fwd_kernel(
    x_ptr,
    weight_ptrs,
    bias_ptrs,
    y_ptr,
    saved_ptrs,
    M,
    x_row_stride,
    row_blocks,
    programs,
    LAYERS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCHEMES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    SAVE_FINAL_PRE: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RESIDENT: tl.constexpr,
    AHEAD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """y = the whole chain; program p computes row blocks p, p + programs, ...

    x (M, WIDTHS[0]) has unit column stride, y and saved are contiguous. ``bias_ptrs[i]`` may be
    None. ``saved_ptrs[i]``, where not None, gets layer i's pre-activation (SAVE_PRE for hidden
    layers, SAVE_FINAL_PRE for the last) or its output. RESIDENT weights are loaded once and stay on
    the chip; otherwise each row block loads them, AHEAD layers before they are needed.
    """
    weights = ()
    if RESIDENT:
        for j in tl.static_range(LAYERS):
            w = _load_weight(
                *(weight_ptrs[j], WIDTHS[j + 1], WIDTHS[j], BLOCKS[j + 1], BLOCKS[j]),
                *(SCHEMES[j], UPCAST),
            )
            weights = weights + (w,)
    for row_block in tl.range(tl.program_id(0), row_blocks, programs):
        _fwd_rows(
            *(row_block, weights, x_ptr, weight_ptrs, bias_ptrs, y_ptr, saved_ptrs),
            *(M, x_row_stride, LAYERS, WIDTHS, BLOCKS, SCHEMES, ACTIVATION, FINAL),
            *(SAVE_PRE, SAVE_FINAL_PRE, MATH, BLOCK_M, AHEAD, UPCAST),
        )


@triton.jit
def _bwd_rows(
    row_block,
    weights,
    dy_ptr,
    weight_ptrs,
    saved_ptrs,
    dpre_ptrs,
    dx_ptr,
    M,
    LAYERS: tl.constexpr,
    STOP: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCHEMES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Layers LAYERS - 1 down to STOP for BLOCK_M rows; dx is the gradient of layer STOP's input."""
    row_offs = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    g = _load_rows(dy_ptr, row_offs, WIDTHS[LAYERS], M, WIDTHS[LAYERS], BLOCK_M, BLOCKS[LAYERS])
    g = g.to(tl.float32)
    saved = g
    if FINAL != "none":
        saved = _load_rows(
            *(saved_ptrs[LAYERS - 1], row_offs, WIDTHS[LAYERS], M, WIDTHS[LAYERS], BLOCK_M),
            BLOCKS[LAYERS],
        )
    for i in tl.static_range(LAYERS - 1, STOP - 1, -1):
        if (FINAL if i + 1 == LAYERS else ACTIVATION) == "none":
            dpre = g
        else:
            dpre = activation_grad(
                g, saved.to(tl.float32), FINAL if i + 1 == LAYERS else ACTIVATION, MATH
            )
        if i > STOP or dx_ptr is not None:
            if len(weights) > 0:
                w = weights[i]
            else:
                w = _load_weight(
                    *(
                        weight_ptrs[i],
                        WIDTHS[i + 1],
                        WIDTHS[i],
                        BLOCKS[i + 1],
                        BLOCKS[i],
                        SCHEMES[i],
                        UPCAST,
                    )
                )
        if i > STOP and ACTIVATION != "none":  # asked for before the product that hides its latency
            saved = _load_rows(
                *(saved_ptrs[i - 1], row_offs, WIDTHS[i], M, WIDTHS[i], BLOCK_M, BLOCKS[i])
            )
        dpre = _clear_padding(dpre, WIDTHS[i + 1], BLOCKS[i + 1])
        if not UPCAST:
            dpre = dpre.to(dy_ptr.dtype.element_ty)
        if dpre_ptrs[i] is not None:
            _store_rows(dpre_ptrs[i], dpre, row_offs, M, WIDTHS[i + 1], BLOCK_M, BLOCKS[i + 1])
        if i > STOP or dx_ptr is not None:
            dpre = _operand(dpre, SCHEMES[i], UPCAST)
            g = _dot(dpre, w, None, SCHEMES[i])
    if dx_ptr is not None:
        _store_rows(dx_ptr, g, row_offs, M, WIDTHS[STOP], BLOCK_M, BLOCKS[STOP])


@triton.jit
def _mlp_bwd_dx_kernel(
    dy_ptr,
    weight_ptrs,
    saved_ptrs,
    dpre_ptrs,
    dx_ptr,
    M,
    row_blocks,
    programs,
    LAYERS: tl.constexpr,
    STOP: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCHEMES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RESIDENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dy → dpre of every layer → dx; program p computes row blocks p, p + programs, ...

    All matrices are contiguous. ``saved_ptrs[i]`` is what layer i's derivative reads (None where
    it reads nothing), ``dpre_ptrs[i]`` where its pre-activation gradient goes (None: nowhere).
    Layers below STOP are left out. ``dx_ptr`` (M, WIDTHS[STOP]) may be None.
    """
    weights = ()
    if RESIDENT:
        for j in tl.static_range(LAYERS):
            w = _load_weight(
                *(weight_ptrs[j], WIDTHS[j + 1], WIDTHS[j], BLOCKS[j + 1], BLOCKS[j]),
                *(SCHEMES[j], UPCAST),
            )
            weights = weights + (w,)
    for row_block in tl.range(tl.program_id(0), row_blocks, programs):
        _bwd_rows(
            *(row_block, weights, dy_ptr, weight_ptrs, saved_ptrs, dpre_ptrs, dx_ptr, M),
            *(LAYERS, STOP, WIDTHS, BLOCKS, SCHEMES, ACTIVATION, FINAL, MATH, BLOCK_M, UPCAST),
        )


@triton.jit
def _bwd_dw_layer(
    dpre_ptr,
    input_ptr,
    part_ptr,
    row_begin,
    row_end,
    input_row_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    APPLY: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    SCHEME: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dW (N, K) then db (N,) of one layer over rows [row_begin, row_end), stored at part_ptr.

    db is a product with ones: the sum runs on the matrix unit along with dW.
    """
    dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    db = tl.zeros((BLOCK_N, 16), dtype=tl.float32)
    for row in tl.range(row_begin, row_end, BLOCK_M):
        row_offs = row + tl.arange(0, BLOCK_M)
        dpre = _load_rows(dpre_ptr, row_offs, N, row_end, N, BLOCK_M, BLOCK_N)
        h = _load_rows(input_ptr, row_offs, input_row_stride, row_end, K, BLOCK_M, BLOCK_K)
        if APPLY:
            # Rows past the end may become act(0): dpre is zero there.
            out = activation(h.to(tl.float32), ACTIVATION, MATH)
            h = out if UPCAST else out.to(h.dtype)
        dpre = _operand(dpre, SCHEME, UPCAST)
        h = _operand(h, SCHEME, UPCAST)
        ones = tl.full((BLOCK_M, 16), 1.0, dtype=dpre.dtype)
        dw = _dot(tl.trans(dpre), h, dw, SCHEME)
        db = _dot(tl.trans(dpre), ones, db, SCHEME)
    n_offs = tl.arange(0, BLOCK_N)
    k_offs = tl.arange(0, BLOCK_K)
    kind = part_ptr.dtype.element_ty
    tl.store(
        part_ptr + n_offs[:, None] * K + k_offs[None, :],
        dw.to(kind),
        mask=(n_offs[:, None] < N) & (k_offs[None, :] < K),
    )
    tl.store(part_ptr + N * K + n_offs, (tl.sum(db, 1) * (1.0 / 16)).to(kind), mask=n_offs < N)


@triton.jit
def _mlp_bwd_dw_kernel(
    dpre_ptrs,
    input_ptrs,
    part_ptr,
    M,
    x_row_stride,
    split_rows,
    COUNT: tl.constexpr,
    SHAPES: tl.constexpr,
    OFFSETS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    SCHEME: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Weight and bias gradients of COUNT layers over one slice of the rows.

    Program axis 0 is the layer, axis 1 the slice: rows [s * split_rows, (s + 1) * split_rows).
    ``dpre_ptrs[i]`` (M, N) is contiguous, ``input_ptrs[i]`` (M, K) has unit column stride; the
    layer's input is that or ACTIVATION of it. SHAPES[i] is (N, K, BLOCK_N, BLOCK_K, whether the
    input is x, whose row stride is given, whether ACTIVATION is to be applied). Slice s of part
    (slices, OFFSETS[COUNT]) gets each layer's dW (N, K) and db (N,), layer i at OFFSETS[i].
    """
    layer = tl.program_id(0)
    piece = tl.program_id(1)
    row_begin = piece * split_rows
    row_end = tl.minimum(row_begin + split_rows, M)
    part_ptr += piece.to(tl.int64) * OFFSETS[COUNT]
    for i in tl.static_range(COUNT):
        if layer == i:
            _bwd_dw_layer(
                *(dpre_ptrs[i], input_ptrs[i], part_ptr + OFFSETS[i], row_begin, row_end),
                *(x_row_stride if SHAPES[i][4] else SHAPES[i][1], SHAPES[i][0], SHAPES[i][1]),
                *(
                    SHAPES[i][2],
                    SHAPES[i][3],
                    SHAPES[i][5],
                    ACTIVATION,
                    MATH,
                    SCHEME,
                    BLOCK_M,
                    UPCAST,
                ),
            )


@triton.jit
def _mlp_sum_parts_kernel(
    part_ptr, out_ptr, total, PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr
):
    """out (total,) = the sum over parts (PARTS, total), in a fixed order."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < total
    acc = tl.zeros((BLOCK_P, BLOCK), dtype=tl.float32)
    for first in tl.range(0, PARTS, BLOCK_P):
        parts = first + tl.arange(0, BLOCK_P)
        ptrs = part_ptr + parts[:, None].to(tl.int64) * total + offs[None, :]
        acc += tl.load(ptrs, mask=(parts[:, None] < PARTS) & inside[None, :], other=0.0)
    tl.store(out_ptr + offs, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=inside)
