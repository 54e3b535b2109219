"""From a call's tensors to its Problem, and from there to the backend of each piece."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.select import Choice, select
from fastlinear.ops.linear_act import backends

_LAUNCH_BOUND = (
    "the step takes less time on the device than its launches take on the host, where PyTorch's "
    "own autograd is cheapest; inside a CUDA graph, force a backend"
)


def choices(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None,
    needs_grad: bool,
) -> tuple[Choice, ...]:
    """The selection for the forward and, with ``needs_grad``, for each piece of the backward."""
    p = problem_of(x, weight, bias, activation, needs_grad)
    # Facts of a device are read from the current one.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        if not needs_grad:
            return (select(p, backend),)
        problems = [p, *(p.with_piece(piece) for piece in backends.BACKWARD_PIECES)]
        if p.device == "cuda" and backend is None and backends.launch_bound(p):
            return tuple(
                replace(select(q, "eager"), source="launch_bound", reason=_LAUNCH_BOUND)
                for q in problems
            )
        return (select(p, backend), *(select(q) for q in problems[1:]))


def problem_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, needs_grad: bool
) -> Problem:
    """The forward Problem of a call."""
    n, k = weight.shape
    m = x.shape[:-1].numel()
    return backends.problem(
        "forward",
        m,
        k,
        n,
        dtype=DTYPE_NAMES[x.dtype],
        device=x.device.type,
        activation=activation,
        bias=bias is not None,
        needs_grad=needs_grad,
        x_layout=_x_layout(x, m, k),
        w_layout=_w_layout(weight),
        precision=matmul_precision(x.dtype),
    )


def _x_layout(x: Tensor, m: int, k: int) -> str:
    """How x's (M, K) view lies in memory, in the words of ``backends.problem``."""
    return backends.x_layout_of(x.detach().reshape(m, k) if x.numel() else x.new_empty(m, k))


def _w_layout(weight: Tensor) -> str:
    if weight.is_contiguous():
        return "nk"
    return "kn" if weight.t().is_contiguous() else "strided"
