"""``half.cpp`` from Python: products with 16-bit weights on the CPU.

Numbers of a row lie side by side, rows at any distance. Nothing here checks shapes.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES
from fastlinear.core.device import cpu_flags
from fastlinear.fastpath import recorder
from fastlinear.native import cpp_build

SOURCE = Path(__file__).with_name("half.cpp")
MOST_ROWS = {"bfloat16": 32, "float16": 2048}
"""Rows of x that are served. Beyond, PyTorch's own products of bfloat16 are the faster ones; those
of float16 are at no number measured, 1 to 512."""
_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl"})


def reason_not(dtype: str, rows: int) -> str | None:
    """Why the library cannot serve so many rows, as far as is known without compiling it."""
    most = MOST_ROWS.get(dtype)
    if most is None:
        return f"bfloat16 and float16 only, not {dtype}"
    if rows > most:
        return f"serves up to {most} rows of x in {dtype}, the call has {rows}"
    if not cpu_flags() >= _FLAGS:
        return "written for processors with AVX-512"
    return cpp_build.reason_not() or cpp_build.failed(SOURCE)


@cpp_build.asked_once
def why_not_loaded() -> str | None:
    """Why the library cannot be had, or None; compiles it if this was not tried before."""
    return cpp_build.reason_not() or cpp_build.why_not_loaded(SOURCE)


def layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) or None → (y (M, N), pre (M, N) or None).

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    (m, k), n = x.shape, weight.shape[0]
    y = x.new_empty(m, n)
    pre = x.new_empty(m, n) if save_pre else None
    bias = None if bias is None else bias.contiguous()
    if y.numel():
        kind = CODES[activation], int(x.dtype is torch.bfloat16)
        given = x, x.stride(0), weight, weight.stride(0), bias, y, pre, m, k, n
        recorder.run(_library().fastlinear_half, *kind, *given)
    return y, pre


def gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu): x (M, K), gate and up (H, K) with rows equally far apart,
    biases (H,) with equal strides or None → h (M, H).

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    (m, k), n = x.shape, gate.shape[0]
    h = x.new_empty(m, n)
    step = next((b.stride(0) for b in (gate_bias, up_bias) if b is not None), 1)
    if h.numel():
        kind = CODES[activation], int(x.dtype is torch.bfloat16)
        given = x, x.stride(0), gate, up, gate.stride(0), gate_bias, up_bias, step, h, m, k, n
        recorder.run(_library().fastlinear_half_gated, *kind, *given)
    return h


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(SOURCE)
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    head: list[Any] = [number, number, pointer, size]
    one, two = library.fastlinear_half, library.fastlinear_half_gated
    one.argtypes = [*head, pointer, size, *[pointer] * 3, *[size] * 3]
    two.argtypes = [*head, *[pointer] * 2, size, *[pointer] * 2, size, pointer, *[size] * 3]
    one.restype = two.restype = None
    return library
