"""What the Triton kernels of backend ``whole`` are made of: tiles of a chain of narrow Linears.

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
