"""Passes of activations by Triton: results, and second and third derivatives of smooth ones.

As ``kernels.cpu.elementwise`` has them. Importing this imports Triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastlinear.activations.reference import math_of
from fastlinear.activations.triton import activation, activation_slopes
from fastlinear.kernels.triton.launch import Launch

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
    tl.store(out_ptr + offs, activation(pre, ACTIVATION, MATH), mask=mask)


@triton.jit
def _second_kernel(
    g_ptr,
    e_ptr,
    saved_ptr,
    by_e_ptr,
    by_saved_ptr,
    NUMBERS,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of dpre = e act'(saved): g times its derivatives by e and by saved. All are dense."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < NUMBERS
    g = tl.load(g_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    e = tl.load(e_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    saved = tl.load(saved_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    first, second, _ = activation_slopes(saved, ACTIVATION, MATH)
    tl.store(by_e_ptr + offs, g * first, mask=mask)
    tl.store(by_saved_ptr + offs, g * e * second, mask=mask)


@triton.jit
def _third_kernel(
    a_ptr,
    b_ptr,
    g_ptr,
    e_ptr,
    saved_ptr,
    by_g_ptr,
    by_e_ptr,
    by_saved_ptr,
    NUMBERS,
    ACTIVATION: tl.constexpr,
    MATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of what ``_second_kernel`` writes, with gradients a and b: those of g, e and saved."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < NUMBERS
    a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    e = tl.load(e_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    saved = tl.load(saved_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    first, second, third = activation_slopes(saved, ACTIVATION, MATH)
    tl.store(by_g_ptr + offs, a * first + b * e * second, mask=mask)
    tl.store(by_e_ptr + offs, b * g * second, mask=mask)
    tl.store(by_saved_ptr + offs, g * (a * second + b * e * third), mask=mask)


def activated(pre: Tensor, name: str) -> Tensor:
    """act(pre): float32, bfloat16 or float16, dense, of any shape; a new tensor.

    PyTorch's operation would cost a recorded call's host as much as five launches do.
    """
    out = pre.new_empty(pre.shape)
    _run(_activate_kernel, name, pre, out, block=2048, warps=8)
    return out


def second(name: str, g: Tensor, e: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
    """Of dpre = e act'(saved), for a smooth activation: g times its derivatives by e and by saved.
    All tensors are dense, of one shape and dtype: float32, bfloat16 or float16."""
    by_e, by_saved = g.new_empty(g.shape), g.new_empty(g.shape)
    _run(_second_kernel, name, g, e, saved, by_e, by_saved)
    return by_e, by_saved


def third(
    name: str, a: Tensor, b: Tensor, g: Tensor, e: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of what ``second`` returns, with gradients a and b: the gradients of g, e and saved."""
    by_g, by_e, by_saved = (g.new_empty(g.shape) for _ in range(3))
    _run(_third_kernel, name, a, b, g, e, saved, by_g, by_e, by_saved)
    return by_g, by_e, by_saved


def _run(kernel: Any, name: str, *given: Tensor, block: int = 1024, warps: int = 4) -> None:
    """Launch a kernel over the numbers of dense tensors of one shape."""
    first, numbers = given[0], given[0].numel()
    if not numbers:
        return
    aligned = tuple([t.data_ptr() & 15 for t in given])
    key = kernel, name, numbers, first.dtype, first.device, aligned
    launch = _plans.get(key)
    if launch is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        rest, grid = (numbers, name, math_of(first.dtype), block), (-(-numbers // block),)
        launch = _plans[key] = Launch(kernel, grid, rest, first.device, warps=warps)
    launch(*given)
