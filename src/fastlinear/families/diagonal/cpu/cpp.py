"""Backend ``cpp`` of diagonal_linear: C++ compiled for this processor.

One pass over memory forward and one backward, on torch's own threads.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.families.diagonal.reference import Gradients, Needs
from fastlinear.fastpath import recorder
from fastlinear.kernels.cpu import allocator
from fastlinear.native import cpp_build

SOURCE = Path(__file__).with_name("diagonal.cpp")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # diagonal.cpp's numbers
_CHUNKS = 16  # of rows, each with sums of its own, whatever the number of threads
_FRESH_BYTES = 1 << 25  # new results from this size on get large pages
_PAST_BYTES = 1 << 22  # a dx from this size on is written around the caches


def reason_not(problem: Problem) -> str | None:
    """Why the C++ passes cannot serve a Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if FLOAT_DTYPES[problem.dtype] not in _DTYPES:
        return f"float32, bfloat16 and float16 only, not {problem.dtype}"
    if problem.option("x") == "strided":
        return "features do not lie side by side; PyTorch's own ops keep such a layout"
    return cpp_build.reason_not() or cpp_build.failed(SOURCE)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """act(x ∘ w + b) + r, float32 arithmetic.

    Args:
        x: (M, K) of float32, bfloat16 or float16 with unit stride along K (others are copied).
        weight, bias: (K,), contiguous; bias may be None.
        activation: its name.
        residual: (M, K) laid out as x may be, or None.
        out: contiguous (M, K) to write to, or None for a new tensor.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    x, residual = unit(x), None if residual is None else unit(residual)
    y = _empty(tuple(x.shape), x) if out is None else out
    if x.numel() == 0:
        return y
    call = described(x, activation, residual, new=out is None)
    recorder.run(_library().fastlinear_diagonal_forward, call, x, weight, bias, residual, y)
    return y


def backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    needs: Needs,
) -> Gradients:
    """(dx, dw, db), each None where not needed, in one pass; sums in float64, in a fixed order.

    Args:
        dy: (M, K), contiguous.
        x: (M, K) with unit stride along K (others are copied); None where it is not read.
        weight, bias: (K,), contiguous; None where they are not read.
        activation: its name.
        needs: which of dx (M, K), dw (K,) and db (K,) are wanted.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    dx = _empty(tuple(dy.shape), dy) if needs[0] else None
    k = dy.shape[1]
    if dy.numel() == 0:
        dw, db = (dy.new_zeros(k) if need else None for need in needs[1:])
        return dx, dw, db
    dw, db = (_empty((k,), dy) if need else None for need in needs[1:])
    x = dy if x is None else unit(x)  # without an activation and dw its values do not matter
    weight = dy[0] if weight is None else weight  # nor do these without dx
    call = described(x, activation, None, new=True)
    recorder.run(_library().fastlinear_diagonal_backward, call, dy, x, weight, bias, dx, dw, db)
    return dx, dw, db


def described(x: Tensor, activation: str, residual: Tensor | None, *, new: bool) -> Any:
    """The numbers of a call as ``diagonal.cpp`` reads them; x and the residual (M, K) with unit
    stride along K.

    Args:
        new: whether y, or dx, is a new tensor.
    """
    numbers = (
        *(CODES[activation], _DTYPES[x.dtype], *x.shape, x.stride(0)),
        0 if residual is None else residual.stride(0),
        _CHUNKS,
        new and _bytes(x) >= _FRESH_BYTES,
        _bytes(x) >= _PAST_BYTES,
    )
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return allocator.empty(shape, like.dtype)


def unit(x: Tensor) -> Tensor:
    """x with unit stride along K; one column or row may state any stride for the other."""
    m, k = x.shape
    if k > 1 and x.stride(1) != 1:
        return x.contiguous()
    return x.reshape(-1).view(m, k) if m == 1 and x.stride(0) != k else x


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return cpp_build.load_calls(
        SOURCE, fastlinear_diagonal_forward=6, fastlinear_diagonal_backward=8
    )
