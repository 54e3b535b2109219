"""Backend ``cpp`` of grouped_linear: one C++ call forward and one backward, compiled for this
processor.

float32 with vectors of 256 or 512 bits, bfloat16 with AMX tiles or pairs in vectors. Tensors are
read and written where they lie; bias and activation cost no pass of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.device import cpu_flags
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import about_to_run
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.reference import Gradients, Needs
from fastlinear.fastpath import recorder
from fastlinear.native import cpp_build

SOURCE = Path(__file__).with_name("grouped.cpp")
NO_VECTORS = "written for processors with AVX2 or AVX-512"
NO_HALF = "bfloat16 takes a processor with products of it, AMX or AVX512_BF16"
_NOWHERE = (0, 0, 0, 0)


def reason_not(problem: Problem) -> str | None:
    """Why the C++ products cannot serve a Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    return why_no_vectors() or why_no_products(problem, SOURCE)


def why_no_products(
    problem: Problem, source: Path, has_half: Callable[[], Any] | None = None
) -> str | None:
    """Why products of a C++ source cannot serve a Problem of the CPU, or None.

    Args:
        has_half: whether the library has products of bfloat16, asked of a call that runs.
    """
    if problem.dtype not in ("float32", "bfloat16"):
        return f"float32 and bfloat16 only, not {problem.dtype}"
    half = problem.dtype == "bfloat16"
    if half and half_products() is None:
        return NO_HALF
    why = cpp_build.reason_not() or cpp_build.failed(source)
    if why is None and half and has_half is not None and about_to_run.get() and not has_half():
        return NO_HALF
    return why


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (B, L, G, K), weight (G, N, K), bias (G, N), any strides → y (B, L, G, N) in
    ``order``, pre if asked. Deterministic.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    if not serves(x.dtype):
        return reference.forward(x, weight, bias, activation, save_pre, order)
    y = layouts.empty((*x.shape[:3], weight.shape[1]), order, x, x.dtype)
    pre = layouts.empty(y.shape, order, x, x.dtype) if save_pre else None
    bias = None if bias is None else bias.contiguous()
    call = described(x, weight, activation, y)
    recorder.run(_library().fastlinear_grouped_forward, call, x, weight, bias, y, pre)
    return y, pre


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
) -> Gradients:
    """(dx, dW, db), each None where not needed; dx lies in ``order``, dW and db are contiguous.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    if not serves(x.dtype):
        return reference.backward(dy, saved, x, weight, activation, needs, order)
    dx = layouts.empty(x.shape, order, x, x.dtype) if needs[0] else None
    dw = weight.new_empty(weight.shape) if needs[1] else None
    db = weight.new_empty(weight.shape[:2]) if needs[2] else None
    if activation_of(activation).saved == "none":
        saved = None
    call = described(x, weight, activation, dy, saved, dx)
    recorder.run(_library().fastlinear_grouped_backward, call, dy, saved, x, weight, dx, dw, db)
    return dx, dw, db


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
