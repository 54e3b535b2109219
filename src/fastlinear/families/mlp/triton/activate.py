"""A hidden layer's results, from what comes before its activation, in one launch of our own.

A forward keeps the one or the other. PyTorch's operation would cost a recorded call's host as much
as five launches do.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastlinear.activations.reference import math_of
from fastlinear.activations.triton import activation as act
from fastlinear.kernels.triton.launch import Launch

_BLOCK, _WARPS = 2048, 8
_MAX_PLANS = 1024
_plans: dict[Any, Launch] = {}


@triton.jit
def _activate_kernel(
    pre_ptr,
    out_ptr,
    NUMBERS,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = act(pre), both dense."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < NUMBERS
    pre = tl.load(pre_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, act(pre, ACTIVATION, MATH), mask=mask)


def activated(pre: Tensor, activation: str) -> Tensor:
    """act(pre): float32, bfloat16 or float16, dense, of any shape; a new tensor."""
    out = pre.new_empty(pre.shape)
    numbers = pre.numel()
    if not numbers:
        return out
    key = numbers, pre.dtype, pre.device, activation, pre.data_ptr() & 15
    launch = _plans.get(key)
    if launch is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        rest = numbers, activation, math_of(pre.dtype), _BLOCK
        grid = (-(-numbers // _BLOCK),)
        launch = _plans[key] = Launch(_activate_kernel, grid, rest, pre.device, warps=_WARPS)
    launch(pre, out)
    return out
