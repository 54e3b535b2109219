"""Single launches of linear_act's CUDA kernels, as the compiled door runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastlinear.ops.common.door_launch import DoorLaunch


def in_door(
    backend: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    fallback: Callable[..., Tensor],
) -> Any:
    """The door's tuple for the forward of such CUDA tensors, or None where one launch is not all.

    It must have run on them before. ``fallback`` serves calls of otherwise aligned addresses.
    """
    launch = _of(backend, x, weight, bias, activation)
    return None if launch is None else launch.plan(fallback, weight.shape[0])


def _of(
    backend: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> DoorLaunch | None:
    if x.dim() != 2:
        if not x.is_contiguous():
            return None
        x = x.view(-1, x.shape[-1])
    if bias is not None and bias.stride(0) != 1:
        return None
    if backend == "cuda":
        from fastlinear.ops.linear_act import cuda

        return cuda.door_launch(x, weight, bias, activation)
    if backend == "triton":
        from fastlinear.ops.linear_act import triton

        return triton.door_launch(x, weight, bias, activation)
    return None
