"""From a call's tensors to its Problem, and from there to the backend of each piece."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import Choice, select
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.linear_act.problem import x_layout_of
from fastlinear.ops.mlp import backends, layerwise
from fastlinear.ops.mlp.problem import PIECES, STEP


def choices(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
    backend: str | None,
    needs_grad: bool,
) -> tuple[Choice, ...]:
    """The selection for the forward and, with ``needs_grad``, for the backward.

    A forced backend holds for the backward as well where it has one that can serve.
    """
    # Facts of a device are read from the current one.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        p = problem_of(x, weights, biases, activation, final_activation, needs_grad)
        return choices_of(p, backend)


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


def tuning_order(p: Problem) -> tuple[Problem, ...]:
    """All Problems that decide about a forward Problem, in the order in which to tune them: first
    those of linear_act that its layers are, since ``layerwise`` stands on their choices."""
    own = (*PIECES, STEP) if p.needs_grad else ("forward",)
    layers = layerwise.layer_problems(p) if layerwise.reason_not(p) is None else ()
    return (*layers, *(p.with_piece(piece) for piece in own))


def backward_choice(p: Problem, backend: str | None = None) -> Choice:
    """The backend of a backward Problem; ``backend`` where it can serve."""
    candidates = family(p.family).candidates("backward")
    able = [b.name for b in candidates if b.name == backend and b.reason_not(p) is None]
    return select(p, able[0] if able else None)


def problem_of(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
    needs_grad: bool,
) -> Problem:
    """The forward Problem of a call; the arguments are valid."""
    m, k = x.shape[:-1].numel(), x.shape[-1]
    rows = x.detach().reshape(m, k) if x.numel() else x.new_empty(m, k)
    given = sum(b is not None for b in biases)
    return backends.problem(
        "forward",
        m,
        (k, *(w.shape[0] for w in weights)),
        dtype=DTYPE_NAMES[x.dtype],
        device=x.device.type,
        activation=activation,
        final_activation=final_activation,
        bias="no" if given == 0 else "yes" if given == len(biases) else "some",
        needs_grad=needs_grad,
        x_layout=x_layout_of(rows),
        w_layout="nk" if all(w.is_contiguous() for w in weights) else "mixed",
        precision=matmul_precision(x.dtype),
        captured=is_captured(x),
    )
