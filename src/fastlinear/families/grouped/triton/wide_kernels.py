"""Triton kernel of grouped_linear's forward for wide groups, through TMA descriptors."""

from __future__ import annotations

import triton
import triton.language as tl

from fastlinear.activations.triton import activation


@triton.jit
def _wide_kernel(
    x_desc,
    w_desc,
    bias_ptr,
    y_desc,
    pre_desc,
    G,
    col_tiles,
    tiles,
    programs,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Tiles (BLOCK_M, BLOCK_N) of y = act(x Wᵀ + b); K and N are multiples of the tile's.

    x is (M, G·K), W (G·N, K), y and pre (M, G·N); ``bias_ptr`` (G, N) and ``pre_desc`` may be None.
    Tiles run through the columns of a group, then the groups, then the tokens.
    """
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
        c = tile % col_tiles
        g = (tile // col_tiles) % G
        m = (tile // (col_tiles * G)) * BLOCK_M
        n = g * N + c * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([m, g * K + k])
            w = w_desc.load([n, k])
            if UPCAST:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            acc = tl.dot(x, w.T, acc)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n + tl.arange(0, BLOCK_N)).to(tl.float32)[None, :]
        if HALVES:
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _store(left, y_desc, pre_desc, m, n, ACTIVATION, MATH)
            _store(right, y_desc, pre_desc, m, n + BLOCK_N // 2, ACTIVATION, MATH)
        else:
            _store(acc, y_desc, pre_desc, m, n, ACTIVATION, MATH)


@triton.jit
def _store(acc, y_desc, pre_desc, m, n, ACTIVATION: tl.constexpr, MATH: tl.constexpr):
    if pre_desc is not None:
        pre_desc.store([m, n], acc.to(pre_desc.dtype))
    y_desc.store([m, n], activation(acc, ACTIVATION, MATH).to(y_desc.dtype))
