"""Backend ``batch_invariant`` of diagonal_linear: one kernel for any number of rows.

PyTorch's activations on a CPU have other last digits at the end of a tensor, or of a thread's part.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.families.diagonal.cpu import cpp
from fastlinear.families.diagonal.triton import config


def reason_not(p: Problem) -> str | None:
    """Why it cannot serve a Problem, or None."""
    rows = tuple((name, "rows" if name == "x" else value) for name, value in p.options)
    p = replace(p, options=rows)  # features that lie apart are copied
    return cpp.reason_not(p) if p.device == "cpu" else config.reason_not(p)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """act(x ∘ w + b) + r, as the backends ``cpp`` and ``triton`` compute it."""
    x, residual = cpp.unit(x), None if residual is None else cpp.unit(residual)
    if not x.is_cuda:
        return cpp.forward(x, weight, bias, activation, residual, out)
    from fastlinear.families.diagonal.triton import backend

    return backend.forward(x, weight, bias, activation, residual, out)
