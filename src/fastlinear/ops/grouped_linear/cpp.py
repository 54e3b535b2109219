"""Backend ``cpp`` of grouped_linear: products compiled for this processor, float32.

Written for 512-bit vectors. No layout costs a copy: operands are packed in the caches, a part at a
time.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.ops.common import cpp_build
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import reference
from fastlinear.ops.grouped_linear.reference import Gradients, Needs, activated

SOURCE = Path(__file__).with_name("grouped.cpp")


def reason_not(problem: Problem) -> str | None:
    """Why the C++ products cannot serve a Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.dtype != "float32":
        return f"float32 only, not {problem.dtype}"
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return "written for processors with AVX-512"
    return cpp_build.reason_not() or cpp_build.failed(SOURCE)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (B, L, G, K), weight (G, N, K), bias (G, N), any strides → y (B, L, G, N) in
    ``order``, pre if asked. float32, deterministic.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    pre = _product(x, weight.transpose(1, 2), order, bias)
    if pre is None:
        return reference.forward(x, weight, bias, activation, save_pre, order)
    return activated(pre, activation, save_pre)


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
    dpre = dy if saved is None else activation_of(activation).backward(dy, saved)
    rows, inputs = _by_group(dpre), _by_group(x)
    if rows is None or inputs is None:
        return reference.backward(dpre, None, x, weight, "none", needs, order)
    dx = _product(dpre, weight, order, None) if needs[0] else None
    if needs[0] and dx is None:
        dx = reference.product(dpre, weight, order)
    dw = None
    if needs[1]:
        dw = torch.empty(weight.shape)
        _run(rows.transpose(1, 2), inputs, None, dw)
    return dx, dw, dpre.sum((0, 1)) if needs[2] else None


def _product(t: Tensor, w: Tensor, order: str, bias: Tensor | None) -> Tensor | None:
    """t (B, L, G, D) times w (G, D, E) plus bias (G, E), dense in ``order``; None where the tokens
    of t or of the result have no one stride, or the result's features do not lie side by side."""
    batch, length, groups, _ = t.shape
    rows = _by_group(t)
    if rows is None or (order == "channels" and length > 1):
        return None
    out = layouts.empty((batch, length, groups, w.shape[2]), order, t, t.dtype)
    place = _by_group(out)
    if place is None:
        return None
    _run(rows, w, None if bias is None else bias.contiguous(), place)
    return out


def _by_group(t: Tensor) -> Tensor | None:
    """t (B, L, G, features) as a view (G, B·L, features), None where there is none."""
    batch, length, groups, features = t.shape
    if batch > 1 and length > 1 and t.stride(0) != length * t.stride(1):
        return None
    step = t.stride(1) if length > 1 else t.stride(0)
    return t.as_strided(
        (groups, batch * length, features), (t.stride(2), step, t.stride(3)), t.storage_offset()
    )


def _run(a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor) -> None:
    """c (G, I, J) = a (G, I, L) b (G, L, J) + bias (G, J); columns of c lie side by side."""
    groups, i, depth = a.shape
    code = _library().fastlinear_grouped_product(
        *(a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride()),
        *(0 if bias is None else bias.data_ptr(), c.data_ptr(), c.stride(0), c.stride(1)),
        *(groups, i, depth, b.shape[2], torch.get_num_threads()),
    )
    if code:
        raise MemoryError("grouped_linear: no memory to pack an operand")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(SOURCE)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    operand: list[Any] = [pointer, size, size, size]
    library.fastlinear_grouped_product.argtypes = [
        *operand,
        *operand,
        *(pointer, pointer, size, size),
        *([size] * 4),
        ctypes.c_int,
    ]
    return library
