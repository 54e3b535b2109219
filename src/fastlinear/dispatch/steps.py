"""The choices of families whose training calls are a forward and a backward, or one step."""

from __future__ import annotations

from dataclasses import replace

from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import STEP as STEP
from fastlinear.dispatch.select import Choice, select
from fastlinear.dispatch.work import Work

PIECES = ("forward", "backward")


def choices_of(
    p: Problem, backend: str | None = None, *, own_autograd: bool = True
) -> tuple[Choice, ...]:
    """The selection for a forward Problem and, where it needs gradients, for the backward; of a
    family whose training calls are chosen as one, for the step.

    A forced backend holds for the backward as well where it has one that can serve. A training
    call without one asks first whether the whole step is fastest by PyTorch's own autograd; then
    both pieces are. That choice comes last, unless the pieces are PyTorch's own anyhow.
    ``own_autograd``: whether that may be; it may keep more memory than a call promises.
    """
    if not p.needs_grad:
        return (select(p, backend),)
    if "backward" not in family(p.family).pieces:
        return (select(p.with_piece(STEP), backend),)
    if backend is not None:
        forward = select(p, backend)
        return forward, backward_choice(behind(p, forward.backend.name), backend)
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
    forward = select(p.with_piece("forward"))
    return forward, select(behind(p, forward.backend.name))


def behind(p: Problem, forward: str) -> Problem:
    """The backward's Problem behind a backend of the forward."""
    known, backward = family(p.family), p.with_piece("backward")
    return backward if known.backward_of is None else known.backward_of(backward, forward)


def backward_choice(p: Problem, backend: str | None = None) -> Choice:
    """The backend of a backward Problem; ``backend`` where it can serve."""
    candidates = family(p.family).candidates("backward", on_request=backend is not None)
    able = [b.name for b in candidates if b.name == backend and b.reason_not(p) is None]
    return select(p, able[0] if able else None)


def of_pieces(p: Problem, node: Work) -> tuple[Work, ...]:
    """The work of a training step by our formula: its node, and the pieces as they are chosen."""
    known, forward = family(p.family), p.with_piece("forward")
    first = select(forward, ready=False).backend.name
    backward = behind(p, first)
    second = select(backward, ready=False).backend.name
    pieces = ((forward, first), (backward, second))
    return (node, *(w for q, name in pieces for w in known.work_of(q, name) or ()))


def tuning_order(p: Problem) -> tuple[Problem, ...]:
    """All Problems that decide about a forward Problem, in the order in which to tune them."""
    known = family(p.family)
    if known.tuning_order is not None:
        return known.tuning_order(p)
    if p.piece != "forward" or not p.needs_grad:
        return (p,)
    return tuple(p.with_piece(piece) for piece in known.pieces)
