"""Backend ``batch_invariant`` of linear_act: a row of y is the same whatever rows are beside it.

On a GPU the depth is never cut into slices, and tiles add up in one order; on a CPU our own
products do. Results of 16 bits are rounded once, on a CPU from float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_gpu
from fastlinear.families.linear.cpu import gemm
from fastlinear.families.linear.triton import config
from fastlinear.kernels.cpu import elementwise
from fastlinear.kernels.cpu import gemm as products


def reason_not(p: Problem) -> str | None:
    """Why it cannot serve a Problem of any family with products, or None."""
    if FLOAT_DTYPES[p.dtype] not in config.DTYPES:
        return f"serves float32, bfloat16 and float16, not {p.dtype}"
    if p.device == "cpu":
        return products.reason_not() or elementwise.reason_not()
    why = why_no_gpu(p, "triton")
    if why is None and torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0 or later"
    return why


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) or None → (y (M, N), pre (M, N) or None).

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    if not x.is_cuda:
        return _on_cpu(x, weight, bias, activation, save_pre)
    from fastlinear.families.linear.triton import backend, product

    how = product.batch_invariant_config(x, weight.t())
    return backend.forward(x, weight, bias, activation, save_pre, config=how)


def _on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    dtype = x.dtype
    if dtype is not torch.float32:
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    y, pre = gemm.forward(x, weight, bias, activation, save_pre)
    return y.to(dtype), None if pre is None else pre.to(dtype)
