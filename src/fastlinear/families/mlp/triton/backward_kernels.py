"""Triton kernels of backend ``whole``, backward; how they read a chain: tiles.py."""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment,attr-defined,no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation, activation_grad
from fastlinear.families.mlp.triton.tiles import (
    _clear_padding,
    _dot,
    _load_rows,
    _operand,
    _store_rows,
    _with_tiles,
    _zeros,
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
    piece,
    total,
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
    """One tile of a dW (N, K) over rows [row_begin, row_end), stored at part_ptr + piece total.

    Tiles at K_FIRST = 0 also give their part of db (N,), stored behind dW, at a multiple of 64
    numbers. It is a product with ones: the sum runs on the matrix unit along with dW.
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
    part_ptr += piece.to(tl.int64) * total  # only now: the loop has no register to keep it in
    kind = part_ptr.dtype.element_ty
    tl.store(
        part_ptr + n_offs[:, None] * K + k_offs[None, :],
        dw.to(kind),
        mask=(n_offs[:, None] < N) & (k_offs[None, :] < K),
    )
    if K_FIRST == 0:
        db_sum = tl.sum(db, 1) * (1.0 / 16)
        tl.store(part_ptr + (N * K + 63) // 64 * 64 + n_offs, db_sum.to(kind), mask=n_offs < N)


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
    whether the layer's input is ACTIVATION of what is given). db follows dW in part, at the next
    multiple of 64 numbers.
    """
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    row_begin = piece * split_rows
    row_end = tl.minimum(row_begin + split_rows, M)
    for t in tl.static_range(COUNT):
        if tile == t:
            _bwd_dw_tile(
                *(dpre_ptrs[TILES[t][0]], input_ptrs[TILES[t][0]], part_ptr + TILES[t][1]),
                *(row_begin, row_end, x_row_stride if TILES[t][8] else TILES[t][3], piece, total),
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
