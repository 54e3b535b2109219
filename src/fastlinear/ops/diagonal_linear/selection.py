"""From a call's Problem to the backend of each piece."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from fastlinear.dispatch.select import Choice
from fastlinear.dispatch.steps import choices_of, select_pieces, tuning_order
from fastlinear.ops.diagonal_linear import backends  # noqa: F401  the family is known from here on
from fastlinear.ops.diagonal_linear.problem import problem_of

__all__ = ["choices", "choices_of", "select_pieces", "tuning_order"]


def choices(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    backend: str | None,
    needs_grad: bool,
    captured: bool = False,
) -> tuple[Choice, ...]:
    """The selection for the forward and, with ``needs_grad``, for the backward."""
    # Facts of a device are read from the current one.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        p = problem_of(x, bias, residual, activation, needs_grad, captured)
        return choices_of(p, backend)
