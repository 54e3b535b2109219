"""Single launches of linear_act's CUDA kernels, as the compiled fast path runs them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.fastpath_launch import FastpathLaunch, Y
from fastlinear.ops.linear_act.cuda_config import config_for

PRE = -2
"""Stands for the pre-activation among the tensors of a call, as ``Y`` for the result."""


def forward(
    backend: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> FastpathLaunch | None:
    """The launch of a forward that has run on such CUDA tensors, or None where that is not all.

    With ``save_pre`` it stores the pre-activation (M, N) as well.
    """
    if x.dim() != 2:
        if not x.is_contiguous():
            return None
        x = x.view(-1, x.shape[-1])
    if bias is not None and bias.stride(0) != 1:
        return None
    if backend == "cuda":
        from fastlinear.ops.linear_act import cuda

        if save_pre:
            return _saving(x, weight, bias, activation)
        return cuda.fastpath_launch(x, weight, bias, activation)
    if backend == "few_rows" and not save_pre:
        from fastlinear.ops.linear_act import few_rows

        return few_rows.fastpath_launch(x, weight, bias, activation)
    if backend == "triton":
        from fastlinear.ops.linear_act import triton

        return triton.fastpath_launch(x, weight, bias, activation, PRE if save_pre else None)
    return None


def _saving(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> FastpathLaunch | None:
    """``cuda.fastpath_launch`` that stores the pre-activation as well."""
    from fastlinear.ops.linear_act import cuda

    plain = cuda.fastpath_launch(x, weight, bias, activation)  # whether one launch is all
    if plain is None:
        return None
    (M, K), N = x.shape, weight.shape[0]
    out = x.new_empty((M, N))
    with driver.loading_allowed():
        config = config_for(M, K, N, True, activation)
        plan = cuda._Plan(config, x, weight, out, bias, activation, True)
    tensors: list[Any] = [(plan.a_map, 0), (plan.b_map, 1), (plan.y, Y), (plan.pre, PRE)]
    if bias is not None:
        tensors.append((plan.bias, 2))
    launch = plan.launch
    assert launch._handle is not None
    where = launch._handle, launch._config_ref, launch._slots_ref
    return FastpathLaunch(*where, tuple(tensors), plain.masks, plan)
