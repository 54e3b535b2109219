"""From a call's Problem to the backend of each piece."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.dispatch.select import Choice, select
from fastlinear.ops.diagonal_linear.backends import FAMILY
from fastlinear.ops.diagonal_linear.problem import PIECES, STEP, problem_of


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


def choices_of(p: Problem, backend: str | None = None) -> tuple[Choice, ...]:
    """The same for a forward Problem instead of tensors.

    A forced backend holds for the backward as well where it has one that can serve. A training
    call without one asks first whether the whole step is fastest by PyTorch's own autograd; then
    both pieces are. That choice comes last, unless the pieces are PyTorch's own anyhow.
    """
    if not p.needs_grad:
        return (select(p, backend),)
    if backend is not None:
        return select(p, backend), _backward_choice(p.with_piece("backward"), backend)
    pieces = select_pieces(p)
    if all(c.backend.name == "eager" for c in pieces):
        return pieces
    step = select(p.with_piece(STEP))
    if step.backend.name == "pieces":
        return (*pieces, step)
    reason = f"PyTorch's own autograd was chosen for the whole step ({step.reason})"
    own = (replace(select(c.problem, "eager"), source=step.source, reason=reason) for c in pieces)
    return (*own, step)


def select_pieces(p: Problem) -> tuple[Choice, ...]:
    """The selection for forward and backward of a training call, the step left aside."""
    return tuple(select(p.with_piece(piece)) for piece in PIECES)


def tuning_order(p: Problem) -> tuple[Problem, ...]:
    """All Problems that decide about a forward Problem, in the order in which to tune them."""
    if not p.needs_grad:
        return (p,)
    return tuple(p.with_piece(piece) for piece in (*PIECES, STEP))


def _backward_choice(p: Problem, backend: str) -> Choice:
    candidates = FAMILY.candidates("backward")
    able = [b.name for b in candidates if b.name == backend and b.reason_not(p) is None]
    return select(p, able[0] if able else None)
