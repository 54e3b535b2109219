"""Backend ``cpp`` of ragged_linear: one C++ call forward and one backward on a CPU.

The C++ reads the sizes and gives each thread groups of its own: in float32 products of the BLAS
that PyTorch brings, in bfloat16 AMX tiles or pairs in vectors. Bias, activation and its derivative
are computed on rows that are in the caches.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.grouped.cpu.cpp import why_no_products
from fastlinear.families.grouped.ragged.layout import has_rows, with_rows
from fastlinear.families.grouped.ragged.validation import counted
from fastlinear.fastpath import recorder
from fastlinear.native import cpp_build

SOURCE = Path(__file__).with_name("ragged.cpp")
_GEMM = "sgemm_"


def reason_not(problem: Problem) -> str | None:
    """Why it cannot serve a Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.precision not in ("highest", "n/a"):
        return "its float32 products know no lower precision"
    if problem.option("strides") != "32":
        return "the BLAS counts in 32 bits"
    if _gemm() is None:
        return "PyTorch exports no BLAS"
    return why_no_products(problem, SOURCE, lambda: _library().fastlinear_ragged_half())


def forward(
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, pre if asked, the sizes as they were read), for tensors of any strides. Deterministic.

    Raises:
        InputError: a size is negative, or their sum passes the number of rows.
    """
    x, weight = with_rows(x), _matrices(weight.resolve_neg())
    flat = None if bias is None else bias.resolve_neg().contiguous()
    y = x.new_empty(x.shape[0], weight.shape[1])
    pre = torch.empty_like(y) if save_pre else None
    kept = torch.empty(sizes.shape, dtype=torch.int64, device=x.device)
    call = _described(x, weight, sizes, activation, y)
    given = call, sizes, x, weight, flat, y, pre, kept
    if not recorder.attempt(_library().fastlinear_ragged_forward, *given):
        counted(sizes, x.shape[0])
    return y, pre, kept


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dW, db), each contiguous, or None where not needed; saved is contiguous.

    Raises:
        InputError: as ``forward``.
    """
    dy, x, weight = with_rows(dy), with_rows(x), _matrices(weight.resolve_neg())
    saved = None if activation_of(activation).saved == "none" else saved
    shapes = x.shape, weight.shape, weight.shape[:2]
    found = [
        x.new_empty(shape) if need else None for shape, need in zip(shapes, needs, strict=True)
    ]
    derives = saved is not None and x.dtype is torch.float32
    room = x.new_empty(dy.shape) if derives else None  # for the gradient of the pre-activation
    call = _described(x, weight, sizes, activation, dy)
    given = call, sizes, dy, saved, x, weight, *found, room
    if not recorder.attempt(_library().fastlinear_ragged_backward, *given):
        counted(sizes, x.shape[0])
    dx, dw, db = found
    return dx, dw, db


def _described(x: Tensor, weight: Tensor, sizes: Tensor, activation: str, y: Tensor) -> Any:
    """The numbers of a call as ``ragged_call.h`` reads them; y is dy for a backward."""
    numbers = (
        *(*x.shape[:1], *weight.shape[:1], x.shape[1], weight.shape[1]),
        *(CODES[activation], x.dtype is torch.bfloat16),
        *(sizes.dtype is torch.int64, sizes.stride(0), x.stride(0), y.stride(0)),
        *weight.stride(),
    )
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _matrices(weight: Tensor) -> Tensor:
    """The weight, or a copy whose matrices have contiguous rows or columns."""
    return weight if has_rows(weight[0]) or has_rows(weight[0].t()) else weight.contiguous()


@lru_cache(maxsize=1)
def _gemm() -> Any:
    """The single-precision product of the BLAS in this process, or None."""
    return getattr(ctypes.CDLL(torch._C.__file__), _GEMM, None)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load_calls(
        SOURCE, ctypes.c_int64, fastlinear_ragged_forward=8, fastlinear_ragged_backward=10
    )
    pointer = ctypes.c_void_p
    library.fastlinear_ragged_blas.argtypes = [pointer]
    library.fastlinear_ragged_blas.restype = None
    library.fastlinear_ragged_blas(ctypes.cast(_gemm(), pointer))
    return library
