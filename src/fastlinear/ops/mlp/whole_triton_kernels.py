"""Triton kernels of backend ``whole``: a chain of narrow Linears without leaving the chip.

Layer i maps (M, WIDTHS[i]) to (M, WIDTHS[i + 1]). A width is held as parts of CHUNK columns, the
last one padded to a power of two of at least 16: BLOCKS[i] are the parts' sizes. So a hidden
activation is a tuple of (BLOCK_M, part) tensors, and a weight (N, K), contiguous, is a grid of
(part of N, part of K) tiles. Tiles are padded with zeros, so padded columns never reach a result;
they are set to zero where a non-finite value could cross. Layers are unrolled: tensors of one kind
arrive as a tuple with one entry per layer.

All kernels accumulate in float32 and are deterministic. UPCAST multiplies in float32 (the CPU
interpreter has no bfloat16). SCHEMES holds the scheme of each layer's float32 product: 0 plain
float32, 1 TF32 with operands rounded here (the matrix unit itself truncates), 2 the matrix unit's
float64.
"""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment,attr-defined,no-any-return"
# ruff: noqa: RET505 - Triton goes on compiling after a taken compile-time branch, so every choice
# must be an if/elif/else chain.
from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.ops.common.activations_triton import activation, activation_grad


@triton.jit
def _operand(t, SCHEME: tl.constexpr, UPCAST: tl.constexpr):
    """A product's operand: rounded to nearest TF32 for scheme 1, otherwise as it is."""
    if SCHEME == 1 and t.dtype == tl.float32:
        bits = t.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(t == t, rounded, t)
    elif UPCAST:
        return t.to(tl.float32)
    else:
        return t


@triton.jit
def _dot(a, b, acc, SCHEME: tl.constexpr):
    """acc + a @ b by the scheme."""
    if SCHEME == 0:
        return tl.dot(a, b, acc, input_precision="ieee")
    elif SCHEME == 1:
        return tl.dot(a, b, acc, input_precision="tf32")
    else:
        product = tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64)
        return acc + product.to(tl.float32)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.zeros((ROWS, COLS), dtype=tl.float32)


@triton.jit
def _load_tile(
    weight_ptrs,
    T: tl.constexpr,
    TILES: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCHEMES: tl.constexpr,
    CHUNK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Tile T, (layer, part of N, part of K), of the weights, padded with zeros."""
    return _load_weight(
        *(weight_ptrs[TILES[T][0]], WIDTHS[TILES[T][0] + 1], WIDTHS[TILES[T][0]]),
        *(TILES[T][1], TILES[T][2], BLOCKS[TILES[T][0] + 1][TILES[T][1]]),
        *(BLOCKS[TILES[T][0]][TILES[T][2]], SCHEMES[TILES[T][0]], CHUNK, UPCAST),
    )


@triton.jit
def _load_weight(
    w_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    N_PART: tl.constexpr,
    K_PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCHEME: tl.constexpr,
    CHUNK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Part (N_PART, K_PART) of a weight (N, K), padded to (BLOCK_N, BLOCK_K)."""
    n_offs = N_PART * CHUNK + tl.arange(0, BLOCK_N)[:, None]
    k_offs = K_PART * CHUNK + tl.arange(0, BLOCK_K)[None, :]
    w_ptrs = w_ptr + n_offs * K + k_offs
    if N_PART * CHUNK + BLOCK_N <= N and K_PART * CHUNK + BLOCK_K <= K:
        w = tl.load(w_ptrs)
    else:
        w = tl.load(w_ptrs, mask=(n_offs < N) & (k_offs < K), other=0.0)
    return _operand(w, SCHEME, UPCAST)


@triton.jit
def _with_tiles(
    weights,
    weight_ptrs,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    TILES: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCHEMES: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The tiles loaded so far, and those up to FIRST + AHEAD but before END that are missing."""
    for ahead in tl.static_range(AHEAD + 1):
        if FIRST + ahead >= len(weights) and FIRST + ahead < END:
            w = _load_tile(
                weight_ptrs, FIRST + ahead, TILES, WIDTHS, BLOCKS, SCHEMES, CHUNK, UPCAST
            )
            weights = weights + (w,)
    return weights


@triton.jit
def _load_rows(
    ptr, row_offs, row_stride, M, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr
):
    """Columns [FIRST, FIRST + BLOCK) of rows of a matrix (M, END) with unit column stride.

    Zeros outside of the matrix.
    """
    offs = FIRST + tl.arange(0, BLOCK)
    ptrs = ptr + row_offs.to(tl.int64)[:, None] * row_stride + offs[None, :]
    mask = row_offs[:, None] < M
    if FIRST + BLOCK > END:
        mask = mask & (offs[None, :] < END)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _store_rows(
    ptr,
    values,
    row_offs,
    M,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store (rows, BLOCK) at columns from FIRST on of a contiguous (M, END) matrix."""
    offs = FIRST + tl.arange(0, BLOCK)
    ptrs = ptr + row_offs.to(tl.int64)[:, None] * END + offs[None, :]
    mask = row_offs[:, None] < M
    if FIRST + BLOCK > END:
        mask = mask & (offs[None, :] < END)
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _clear_padding(values, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the columns from END on: a NaN or an infinity there would spread through a product."""
    if FIRST + BLOCK <= END:
        return values
    else:
        return tl.where(FIRST + tl.arange(0, BLOCK)[None, :] < END, values, 0.0)


@triton.jit
def _bias(
    ptr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """What a product starts from: columns [FIRST, FIRST + BLOCK) of a bias (END,), or zeros."""
    if ptr is None:
        return tl.zeros((BLOCK_M, BLOCK), dtype=tl.float32)
    else:
        offs = FIRST + tl.arange(0, BLOCK)
        bias = tl.load(ptr + offs, mask=offs < END, other=0.0).to(tl.float32)
        return tl.broadcast_to(bias[None, :], (BLOCK_M, BLOCK))


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
    PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    TILES: tl.constexpr,
    STARTS: tl.constexpr,
    SCHEMES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    SAVE_FINAL_PRE: tl.constexpr,
    MATH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    AHEAD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """All layers for BLOCK_M rows. ``weights`` holds the first tiles."""
    row_offs = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    h = ()
    for k in tl.static_range(MAX_PARTS):
        if k < PARTS[0]:
            part = _load_rows(x_ptr, row_offs, x_row_stride, M, k * CHUNK, WIDTHS[0], BLOCKS[0][k])
            h = h + (_operand(part, SCHEMES[0], UPCAST),)
    for i in tl.static_range(LAYERS):
        outs = ()
        for n in tl.static_range(MAX_PARTS):
            if n < PARTS[i + 1]:
                acc = _bias(*(bias_ptrs[i], n * CHUNK, WIDTHS[i + 1], BLOCKS[i + 1][n], BLOCK_M))
                for k in tl.static_range(MAX_PARTS):
                    if k < PARTS[i]:
                        weights = _with_tiles(
                            *(weights, weight_ptrs, STARTS[i] + n * PARTS[i] + k, STARTS[LAYERS]),
                            *(TILES, WIDTHS, BLOCKS, SCHEMES, CHUNK, AHEAD, UPCAST),
                        )
                        w = tl.trans(weights[STARTS[i] + n * PARTS[i] + k])
                        acc = _dot(h[k], w, acc, SCHEMES[i])
                if i + 1 < LAYERS:
                    out = activation(acc, ACTIVATION, MATH)
                    out = _clear_padding(out, n * CHUNK, WIDTHS[i + 1], BLOCKS[i + 1][n])
                else:
                    out = activation(acc, FINAL, MATH)
                if saved_ptrs[i] is not None:
                    kept = acc if (SAVE_PRE if i + 1 < LAYERS else SAVE_FINAL_PRE) else out
                    _store_rows(
                        *(saved_ptrs[i], kept, row_offs, M, n * CHUNK, WIDTHS[i + 1]),
                        BLOCKS[i + 1][n],
                    )
                if i + 1 < LAYERS:
                    if not UPCAST:
                        out = out.to(x_ptr.dtype.element_ty)
                    outs = outs + (_operand(out, SCHEMES[i + 1], UPCAST),)
                else:
                    _store_rows(
                        *(y_ptr, out, row_offs, M, n * CHUNK, WIDTHS[i + 1]),
                        BLOCKS[i + 1][n],
                    )
        h = outs


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
    PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    TILES: tl.constexpr,
    STARTS: tl.constexpr,
    SCHEMES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    SAVE_FINAL_PRE: tl.constexpr,
    MATH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RESIDENT: tl.constexpr,
    AHEAD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """y = the whole chain; program p computes row blocks p, p + programs, ...

    x (M, WIDTHS[0]) has unit column stride, y and saved are contiguous. ``bias_ptrs[i]`` may be
    None. ``saved_ptrs[i]``, where not None, gets layer i's pre-activation (SAVE_PRE for hidden
    layers, SAVE_FINAL_PRE for the last) or its output. PARTS[i] is the number of parts of width i,
    MAX_PARTS the largest. TILES lists the tiles in the order of their use, layer i's from STARTS[i]
    on. The first RESIDENT tiles are loaded once and stay on the chip; each row block loads the
    others, AHEAD tiles before they are needed.
    """
    weights = ()
    if RESIDENT > 0:
        weights = _with_tiles(
            *(weights, weight_ptrs, 0, RESIDENT, TILES, WIDTHS, BLOCKS, SCHEMES, CHUNK),
            *(RESIDENT, UPCAST),
        )
    for row_block in tl.range(tl.program_id(0), row_blocks, programs):
        _fwd_rows(
            *(row_block, weights, x_ptr, weight_ptrs, bias_ptrs, y_ptr, saved_ptrs),
            *(
                M,
                x_row_stride,
                LAYERS,
                WIDTHS,
                BLOCKS,
                PARTS,
                MAX_PARTS,
                TILES,
                STARTS,
                SCHEMES,
                ACTIVATION,
            ),
            *(FINAL, SAVE_PRE, SAVE_FINAL_PRE, MATH, CHUNK, BLOCK_M, AHEAD, UPCAST),
        )


@triton.jit
def _load_parts(
    ptr,
    row_offs,
    M,
    WIDTH: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Rows of a contiguous matrix of WIDTHS[WIDTH] columns, as a tuple of its parts."""
    parts = ()
    for n in tl.static_range(MAX_PARTS):
        if n < PARTS[WIDTH]:
            part = _load_rows(
                *(ptr, row_offs, WIDTHS[WIDTH], M, n * CHUNK, WIDTHS[WIDTH], BLOCKS[WIDTH][n])
            )
            parts = parts + (part,)
    return parts


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
    PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    TILES: tl.constexpr,
    STARTS: tl.constexpr,
    SCHEMES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    MATH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    AHEAD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Layers LAYERS - 1 down to STOP for BLOCK_M rows; dx is the gradient of layer STOP's input."""
    row_offs = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    saved = ()
    if FINAL != "none":
        saved = _load_parts(
            *(saved_ptrs[LAYERS - 1], row_offs, M, LAYERS, WIDTHS, BLOCKS, PARTS, MAX_PARTS, CHUNK)
        )
    g = _load_parts(dy_ptr, row_offs, M, LAYERS, WIDTHS, BLOCKS, PARTS, MAX_PARTS, CHUNK)
    for i in tl.static_range(LAYERS - 1, STOP - 1, -1):
        dpres = ()
        for n in tl.static_range(MAX_PARTS):
            if n < PARTS[i + 1]:
                dpre = g[n].to(tl.float32)
                if (FINAL if i + 1 == LAYERS else ACTIVATION) != "none":
                    dpre = activation_grad(
                        dpre,
                        saved[n].to(tl.float32),
                        FINAL if i + 1 == LAYERS else ACTIVATION,
                        MATH,
                    )
                dpre = _clear_padding(dpre, n * CHUNK, WIDTHS[i + 1], BLOCKS[i + 1][n])
                if not UPCAST:
                    dpre = dpre.to(dy_ptr.dtype.element_ty)
                if dpre_ptrs[i] is not None:
                    _store_rows(
                        *(dpre_ptrs[i], dpre, row_offs, M, n * CHUNK, WIDTHS[i + 1]),
                        BLOCKS[i + 1][n],
                    )
                dpres = dpres + (_operand(dpre, SCHEMES[i], UPCAST),)
        if i > STOP and ACTIVATION != "none":  # asked for before the product that hides its latency
            saved = _load_parts(
                *(saved_ptrs[i - 1], row_offs, M, i, WIDTHS, BLOCKS, PARTS, MAX_PARTS, CHUNK)
            )
        if i > STOP or dx_ptr is not None:
            g = ()
            for k in tl.static_range(MAX_PARTS):
                if k < PARTS[i]:
                    acc = _zeros(BLOCK_M, BLOCKS[i][k])
                    for n in tl.static_range(MAX_PARTS):
                        if n < PARTS[i + 1]:
                            weights = _with_tiles(
                                *(weights, weight_ptrs, STARTS[i] + k * PARTS[i + 1] + n),
                                *(STARTS[LAYERS], TILES, WIDTHS, BLOCKS, SCHEMES, CHUNK, AHEAD),
                                UPCAST,
                            )
                            w = weights[STARTS[i] + k * PARTS[i + 1] + n]
                            acc = _dot(dpres[n], w, acc, SCHEMES[i])
                    g = g + (acc,)
    if dx_ptr is not None:
        for k in tl.static_range(MAX_PARTS):
            if k < PARTS[STOP]:
                _store_rows(dx_ptr, g[k], row_offs, M, k * CHUNK, WIDTHS[STOP], BLOCKS[STOP][k])


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
    PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    TILES: tl.constexpr,
    STARTS: tl.constexpr,
    SCHEMES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    MATH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RESIDENT: tl.constexpr,
    AHEAD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """dy → dpre of every layer → dx; program p computes row blocks p, p + programs, ...

    All matrices are contiguous. ``saved_ptrs[i]`` is what layer i's derivative reads (None where
    it reads nothing), ``dpre_ptrs[i]`` where its pre-activation gradient goes (None: nowhere).
    Layers below STOP are left out. ``dx_ptr`` (M, WIDTHS[STOP]) may be None. TILES lists the tiles
    in the order of their use (the last layer first), layer i's from STARTS[i] on.
    """
    weights = ()
    if RESIDENT > 0:
        weights = _with_tiles(
            *(weights, weight_ptrs, 0, RESIDENT, TILES, WIDTHS, BLOCKS, SCHEMES, CHUNK),
            *(RESIDENT, UPCAST),
        )
    for row_block in tl.range(tl.program_id(0), row_blocks, programs):
        _bwd_rows(
            *(row_block, weights, dy_ptr, weight_ptrs, saved_ptrs, dpre_ptrs, dx_ptr, M),
            *(
                LAYERS,
                STOP,
                WIDTHS,
                BLOCKS,
                PARTS,
                MAX_PARTS,
                TILES,
                STARTS,
                SCHEMES,
                ACTIVATION,
                FINAL,
            ),
            *(MATH, CHUNK, BLOCK_M, AHEAD, UPCAST),
        )


@triton.jit
def _bwd_dw_tile(
    dpre_ptr,
    input_ptr,
    part_ptr,
    row_begin,
    row_end,
    input_row_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    N_FIRST: tl.constexpr,
    K_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    APPLY: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    SCHEME: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of a dW (N, K) over rows [row_begin, row_end), stored at part_ptr.

    Tiles at K_FIRST = 0 also give their part of db (N,), stored behind dW. It is a product with
    ones: the sum runs on the matrix unit along with dW.
    """
    dw = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    db = tl.zeros((BLOCK_N, 16), dtype=tl.float32)
    for row in tl.range(row_begin, row_end, BLOCK_M):
        row_offs = row + tl.arange(0, BLOCK_M)
        dpre = _load_rows(dpre_ptr, row_offs, N, row_end, N_FIRST, N, BLOCK_N)
        h = _load_rows(input_ptr, row_offs, input_row_stride, row_end, K_FIRST, K, BLOCK_K)
        if APPLY:
            # Rows past the end may become act(0): dpre is zero there.
            out = activation(h.to(tl.float32), ACTIVATION, MATH)
            h = out if UPCAST else out.to(h.dtype)
        dpre = _operand(dpre, SCHEME, UPCAST)
        h = _operand(h, SCHEME, UPCAST)
        dw = _dot(tl.trans(dpre), h, dw, SCHEME)
        if K_FIRST == 0:
            ones = tl.full((BLOCK_M, 16), 1.0, dtype=dpre.dtype)
            db = _dot(tl.trans(dpre), ones, db, SCHEME)
    n_offs = N_FIRST + tl.arange(0, BLOCK_N)
    k_offs = K_FIRST + tl.arange(0, BLOCK_K)
    kind = part_ptr.dtype.element_ty
    tl.store(
        part_ptr + n_offs[:, None] * K + k_offs[None, :],
        dw.to(kind),
        mask=(n_offs[:, None] < N) & (k_offs[None, :] < K),
    )
    if K_FIRST == 0:
        db_sum = tl.sum(db, 1) * (1.0 / 16)
        tl.store(part_ptr + N * K + n_offs, db_sum.to(kind), mask=n_offs < N)


@triton.jit
def _mlp_bwd_dw_kernel(
    dpre_ptrs,
    input_ptrs,
    part_ptr,
    M,
    x_row_stride,
    split_rows,
    total,
    COUNT: tl.constexpr,
    TILES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    SCHEME: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Weight and bias gradients of some layers over one slice of the rows.

    Program axis 0 is the tile, axis 1 the slice: rows [s * split_rows, (s + 1) * split_rows).
    ``dpre_ptrs[j]`` (M, N) is contiguous, ``input_ptrs[j]`` (M, K) has unit column stride.
    TILES[t] is (j, offset of the layer's dW in a slice of part (slices, total), N, K, the tile's
    first row and column, its padded sizes, whether the input is x, whose row stride is given,
    whether the layer's input is ACTIVATION of what is given). db follows dW in part.
    """
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    row_begin = piece * split_rows
    row_end = tl.minimum(row_begin + split_rows, M)
    part_ptr += piece.to(tl.int64) * total
    for t in tl.static_range(COUNT):
        if tile == t:
            _bwd_dw_tile(
                *(dpre_ptrs[TILES[t][0]], input_ptrs[TILES[t][0]], part_ptr + TILES[t][1]),
                *(row_begin, row_end, x_row_stride if TILES[t][8] else TILES[t][3]),
                *(TILES[t][2], TILES[t][3], TILES[t][4], TILES[t][5], TILES[t][6], TILES[t][7]),
                *(TILES[t][9], ACTIVATION, MATH, SCHEME, BLOCK_M, UPCAST),
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
