"""Triton kernel of backend ``whole``, forward; how it reads a chain: tiles.py."""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment,attr-defined,no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation
from fastlinear.families.mlp.triton.tiles import (
    _bias,
    _clear_padding,
    _dot,
    _load_rows,
    _operand,
    _store_rows,
    _with_tiles,
)


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
