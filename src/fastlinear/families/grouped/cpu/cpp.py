"""Backend ``cpp`` of grouped_linear: one C++ call forward and one backward, compiled for this
processor.

float32 with vectors of 256 or 512 bits, bfloat16 with AMX tiles or pairs in vectors. Tensors are
read and written where they lie; bias and activation cost no pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import about_to_run
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.reference import Gradients, Needs
from fastlinear.kernels.cpu import grouped
from fastlinear.native import cpp_build


def reason_not(problem: Problem) -> str | None:
    """Why the C++ products cannot serve a Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    return grouped.why_no_vectors() or why_no_products(problem, grouped.SOURCE)


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
    if half and grouped.half_products() is None:
        return grouped.NO_HALF
    why = cpp_build.reason_not() or cpp_build.failed(source)
    if why is None and half and has_half is not None and about_to_run.get() and not has_half():
        return grouped.NO_HALF
    return why


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (B, L, G, K), weight (G, N, K), bias (G, N), any strides → y (B, L, G, N) in
    ``order``, pre if asked. Deterministic.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    if not grouped.serves(x.dtype):
        return reference.forward(x, weight, bias, activation, save_pre, order)
    y = layouts.empty((*x.shape[:3], weight.shape[1]), order, x, x.dtype)
    pre = layouts.empty(y.shape, order, x, x.dtype) if save_pre else None
    bias = None if bias is None else bias.contiguous()
    grouped.run_forward(x, weight, bias, activation, y, pre)
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
    if not grouped.serves(x.dtype):
        return reference.backward(dy, saved, x, weight, activation, needs, order)
    dx = layouts.empty(x.shape, order, x, x.dtype) if needs[0] else None
    dw = weight.new_empty(weight.shape) if needs[1] else None
    db = weight.new_empty(weight.shape[:2]) if needs[2] else None
    if activation_of(activation).saved == "none":
        saved = None
    grouped.run_backward(dy, saved, x, weight, activation, dx, dw, db)
    return dx, dw, db
