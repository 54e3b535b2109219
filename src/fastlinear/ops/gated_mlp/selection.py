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
from fastlinear.ops.gated_mlp.problem import PIECES, STEP, problem
from fastlinear.ops.gated_mlp.stacking import Biases, Weights, hidden


def choices(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    recompute: int | None,
    backend: str | None,
    needs_grad: bool,
) -> tuple[Choice, ...]:
    """The selection for the forward and, with ``needs_grad``, for the backward; x (M, K).

    A forced backend holds for the backward as well where it has one that can serve.
    """
    # Facts of a device are read from the current one.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        p = problem_of(x, weights, biases, activation, order, recompute, needs_grad)
        return choices_of(p, backend, own_autograd=recompute is None)


def choices_of(
    p: Problem, backend: str | None = None, *, own_autograd: bool = True
) -> tuple[Choice, ...]:
    """The same for a forward Problem instead of tensors.

    A training call without a forced backend asks first whether the whole step is fastest by
    PyTorch's own autograd; then both pieces are. That choice comes last, unless the pieces are
    PyTorch's own anyhow. ``own_autograd``: whether that may be: it keeps more memory than a level
    of recomputation promises.
    """
    if not p.needs_grad:
        return (select(p, backend),)
    if backend is not None:
        return select(p, backend), backward_choice(p.with_piece("backward"), backend)
    pieces = select_pieces(p)
    if not own_autograd or all(c.backend.name == "eager" for c in pieces):
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
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    recompute: int | None,
    needs_grad: bool,
) -> Problem:
    """The forward Problem of a call; x is (M, K)."""
    m, k = x.shape
    given = [w for w in weights if w is not None]
    held = [b is not None for b, w in zip(biases, weights, strict=True) if w is not None]
    return problem(
        "forward",
        m,
        k,
        hidden(weights),
        0 if weights.down is None else weights.down.shape[0],
        dtype=DTYPE_NAMES[x.dtype],
        device=x.device.type,
        activation=activation,
        bias="yes" if all(held) else "some" if any(held) else "no",
        needs_grad=needs_grad,
        order=order,
        recompute=needs_grad and recompute == 1,
        x="dense" if x.is_contiguous() else "strided",
        w="dense" if all(w.is_contiguous() for w in given) else "strided",
        precision=matmul_precision(x.dtype),
        captured=is_captured(x),
    )
