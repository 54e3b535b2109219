"""Least cost of linear_act's pieces, and the order of its backends where nothing was measured."""

from __future__ import annotations

import torch

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.families.linear import padded_problem
from fastlinear.families.linear.cuda import few_rows_config
from fastlinear.families.linear.problem import PIECES, STEP, WHOLE_BACKWARD
from fastlinear.families.linear.triton import config
from fastlinear.fastpath import autograd_node

_GPU_FLOPS_PER_S = {"half": 6e14, "float32": 4e13}
_GPU_BYTES_PER_S = 3.5e12
_STEP_HOST_S = 1.2e-4  # host time of forward and backward of one layer through autograd, about
_TF32X3_MIN_WORK = 1 << 24


def prefer(p: Problem) -> tuple[str, ...]:
    """Analytic order on a GPU, used only where no measurement covers the Problem."""
    if p.device == "cpu":
        return ("eager",)
    if p.piece == STEP:
        # without nodes in C++ the formula is Python's, which asks more of the host
        slow_host = p.device == "cuda" and not p.captured and autograd_node.reason_not() is not None
        own_autograd = slow_host and _launch_bound(p)
        return ("eager", "pieces") if own_autograd else ("pieces", "eager")
    if p.piece == WHOLE_BACKWARD:
        m, k, n = (p.dim(name) for name in ("M", "K", "N"))
        pays = config.whole_backward_pays(m, k, n, FLOAT_DTYPES[p.dtype])
        one_launch = p.device == "cuda" and pays and (m <= 64 or padded_problem.aligned(p))
        first = ("triton",) if one_launch else ("padded",) if padded_problem.pays(p) else ()
        return (*first, "pieces", "eager")
    first = ("triton",) if _triton_pays(p) else ()
    m, k, n = (p.dim(name) for name in ("M", "K", "N"))
    if p.piece == "forward" and few_rows_config.pays(m, k, n, FLOAT_DTYPES[p.dtype]):
        first = ("few_rows", *first)
    if p.piece != "grad_pre" and not padded_problem.aligned(p):
        first = ("padded",) if padded_problem.pays(p) else ("triton",) if _few_odd_rows(p) else ()
        if p.piece == "forward" and "padded" in first:
            first = ("cuda", *first)  # where K is even enough its kernel needs no copies
    return (*first, "cublaslt", "eager") if p.piece == "forward" else (*first, "eager")


def _few_odd_rows(p: Problem) -> bool:
    """Whether Triton's kernels, without wide loads, still take less than the libraries' do."""
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    return p.piece == "forward" and m <= 64 and k >= 128 and m * k * n < 1 << 27


def _triton_pays(p: Problem) -> bool:
    """Whether three TF32 products beat torch's exact float32 by far: on the data-centre chips,
    whose matrix units are many times as fast as their float32 units."""
    if p.dtype != "float32" or p.precision != "highest" or p.piece == "grad_pre":
        return False
    depth = p.dim({"forward": "K", "grad_input": "N", "grad_weight": "M"}[p.piece])
    if depth < 128 or p.dim("M") * p.dim("K") * p.dim("N") < _TF32X3_MIN_WORK:
        return False
    fast = config.FAST_TF32
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() in fast


def cost(p: Problem) -> Cost:
    """Least flops and bytes of one piece; saved tensors are counted where they are needed."""
    if p.piece == STEP:
        parts = [cost(p.with_piece(piece)) for piece in PIECES]
        return Cost(sum(c.flops for c in parts), sum(c.bytes for c in parts))
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    size = FLOAT_DTYPES[p.dtype].itemsize
    bias = n if p.option("bias") == "yes" else 0
    kept = activation_of(p.option("activation")).saved
    gemm = 2.0 * m * k * n
    saved = 0 if kept == "none" else m * n
    if p.piece == "forward":
        pre = m * n if p.needs_grad and kept == "pre" else 0
        return Cost(gemm, size * (m * k + n * k + bias + m * n + pre))
    if p.piece == WHOLE_BACKWARD:  # dpre need not be written
        return Cost(2 * gemm, size * (m * n + saved + 2 * m * k + 2 * n * k + bias))
    if p.piece == "grad_pre":
        return Cost(0.0, size * (2 * m * n + saved + bias))
    return Cost(gemm, size * (m * k + n * k + m * n))


def _launch_bound(p: Problem) -> bool:
    """Whether a training step of this layer on a GPU takes less time than its launches.

    Then the host decides, and PyTorch's own autograd asks least of it. A guess at the rates of an
    H200, for calls that no measurement covers.
    """
    least = cost(p.with_piece(STEP))
    compute = least.flops / _GPU_FLOPS_PER_S["float32" if p.dtype == "float32" else "half"]
    return max(compute, least.bytes / _GPU_BYTES_PER_S) < _STEP_HOST_S
