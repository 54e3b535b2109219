"""What each backend of diagonal_linear does in a call on a CPU, for its price."""

from __future__ import annotations

from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, call, flags_of, fresh, host
from fastlinear.families.diagonal.problem import NAME, STEP
from fastlinear.fastpath.autograd_node import node_work

_KNOWN = ("eager", "addcmul", "cpp", "pieces")


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in the forward, the backward or a training step; None where
    nobody tells it."""
    if backend not in _KNOWN:
        return None
    if p.piece == STEP and backend != "eager":
        return of_pieces(p, node_work(NAME))
    return (host(f"{NAME} {backend} {p.piece}"), *inner(p, backend))


def inner(p: Problem, backend: str) -> tuple[Work, ...]:
    """The same without the call."""
    m, k = (max(1, p.dim(name)) for name in ("M", "K"))
    sizes = {"numbers": m * k, "k": k, "m": m}
    activation, flags = p.option("activation"), flags_of(p, "bias", "residual", "x")
    name = f"{NAME} {backend} {p.piece} pass"
    return (
        call(name, 1.0, activation, *flags),
        Work(name, m * k, sizes, flags, (activation,)),
        *fresh(m * k, p.dtype),
    )
