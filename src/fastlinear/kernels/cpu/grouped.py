"""``grouped.cpp`` from Python: layers of many groups, or of one, in one C++ call forward and one
backward. Nothing here checks shapes.

float32 with vectors of 256 or 512 bits, bfloat16 with AMX tiles or pairs in vectors. Tensors are
read and written where they lie.
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

SOURCE = Path(__file__).with_name("grouped.cpp")
NO_VECTORS = "written for processors with AVX2 or AVX-512"
NO_HALF = "bfloat16 takes a processor with products of it, AMX or AVX512_BF16"
_NOWHERE = (0, 0, 0, 0)


def run_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, y: Tensor, pre: Tensor | None
) -> None:
    """y = act(x Wᵀ + b), and pre before the activation unless None: x (B, L, G, K), weight (G, N,
    K), y and pre (B, L, G, N) of any strides, bias (G, N) dense.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    call = described(x, weight, activation, y)
    recorder.run(_library().fastlinear_grouped_forward, call, x, weight, bias, y, pre)


def run_backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    dx: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
) -> None:
    """Gradients of it into dx, dw (G, N, K) and db (G, N), the latter two dense, where not None.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    call = described(x, weight, activation, dy, saved, dx)
    recorder.run(_library().fastlinear_grouped_backward, call, dy, saved, x, weight, dx, dw, db)


def described(
    x: Tensor,
    weight: Tensor,
    activation: str,
    y: Tensor,
    saved: Tensor | None = None,
    dx: Tensor | None = None,
) -> Any:
    """The numbers of a call as ``grouped_call.h`` reads them; y is dy for a backward.

    All tensors of tokens are (B, L, G, features).
    """
    places = (t.stride() if t is not None else _NOWHERE for t in (x, y, saved, dx))
    numbers = (
        *(*x.shape, weight.shape[1], CODES[activation], x.dtype is torch.bfloat16),
        *(stride for place in places for stride in place),
        *weight.stride(),
    )
    return (ctypes.c_int64 * len(numbers))(*numbers)


def serves(dtype: torch.dtype) -> bool:
    """Whether what the compiler made of the source has products of that dtype.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    return dtype is torch.float32 or bool(_library().fastlinear_grouped_half())


def why_no_vectors() -> str | None:
    """What a processor without vectors of 256 bits and fused multiplications lacks, or None."""
    wide = "AVX2" in torch.backends.cpu.get_cpu_capability() or has_widest_vectors()
    return None if wide else NO_VECTORS


def has_widest_vectors() -> bool:
    """Whether they have 512 bits."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


@lru_cache(maxsize=1)
def half_products() -> str | None:
    """How this processor multiplies bfloat16 numbers: ``"tiles"`` (AMX), ``"pairs"`` in 512-bit
    vectors, or None."""
    flags = cpu_flags()
    if "avx512_bf16" not in flags:
        return None
    return "tiles" if {"amx_tile", "amx_bf16"} <= flags else "pairs"


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return cpp_build.load_calls(SOURCE, fastlinear_grouped_forward=6, fastlinear_grouped_backward=8)
