"""From a call's tensors to its Problem, and from there to the backend of each piece."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import Choice, select
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.grouped_linear import cpp
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.problem import PIECES, STEP, problem


def choices(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    order: str,
    backend: str | None,
    needs_grad: bool,
) -> tuple[Choice, ...]:
    """The selection for the forward and, with ``needs_grad``, for the backward; x (B, L, G, K).

    A forced backend holds for the backward as well where it has one that can serve.
    """
    # Facts of a device are read from the current one.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        return choices_of(problem_of(x, weight, bias, activation, order, needs_grad), backend)


def ready_choices(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    order: str,
    backend: str | None,
    needs_grad: bool,
) -> tuple[Choice, ...]:
    """``choices`` of a call that is about to run: a library the compiler rejects is passed over
    unless it is forced."""
    given = x, weight, bias, activation, order, backend, needs_grad
    found = choices(*given)
    in_cpp = any(c.backend.name == "cpp" for c in found)
    if backend is None and in_cpp and cpp.why_not_loaded() is not None:
        return choices(*given)
    return found


def choices_of(p: Problem, backend: str | None = None) -> tuple[Choice, ...]:
    """The same for a forward Problem instead of tensors.

    A training call without a forced backend asks first whether the whole step is fastest by
    PyTorch's own autograd; then both pieces are. That choice comes last, unless the pieces are
    PyTorch's own anyhow.
    """
    if not p.needs_grad:
        return (select(p, backend),)
    if backend is not None:
        return select(p, backend), backward_choice(p.with_piece("backward"), backend)
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


def backward_choice(p: Problem, backend: str | None = None) -> Choice:
    """The backend of a backward Problem; ``backend`` where it can serve."""
    candidates = family(p.family).candidates("backward")
    able = [b.name for b in candidates if b.name == backend and b.reason_not(p) is None]
    return select(p, able[0] if able else None)


def tuning_order(p: Problem) -> tuple[Problem, ...]:
    """All Problems that decide about a forward Problem, in the order in which to tune them."""
    own = (*PIECES, STEP) if p.needs_grad else ("forward",)
    return tuple(p.with_piece(piece) for piece in own)


def problem_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, order: str, needs_grad: bool
) -> Problem:
    """The forward Problem of a call; x is (B, L, G, K)."""
    batch, length, groups, k = x.shape
    return problem(
        "forward",
        batch * length,
        groups,
        k,
        weight.shape[1],
        dtype=DTYPE_NAMES[x.dtype],
        device=x.device.type,
        activation=activation,
        bias=bias is not None,
        needs_grad=needs_grad,
        order=order,
        length=length,
        x="dense" if layouts.is_dense(x, order) else "strided",
        w="dense" if weight.is_contiguous() else "strided",
        precision=matmul_precision(x.dtype),
        captured=is_captured(x),
    )
