"""What each backend of diagonal_linear does in a call on a GPU, for its price."""

from __future__ import annotations

from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import hosts, swept
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, flags_of
from fastlinear.families.diagonal.problem import NAME, PIECES, STEP
from fastlinear.fastpath.autograd_node import node_work

_KNOWN = ("eager", "addcmul", "triton", "pieces")


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in the forward, the backward or a training step; None of backends that
    others registered."""
    if backend not in _KNOWN:
        return None
    if p.piece != STEP:
        made = _device(p, backend)
    elif backend == "pieces":
        return of_pieces(p, node_work(NAME))
    else:
        made = tuple(w for piece in PIECES for w in _device(p.with_piece(piece), "eager"))
    return (*hosts(p, backend, made), *made)


def _device(p: Problem, backend: str) -> tuple[Work, ...]:
    m, k = (max(1, p.dim(name)) for name in ("M", "K"))
    flags = flags_of(p, "bias", "residual", "x")
    name = f"{NAME} {backend} {p.piece}"
    return swept(name, p, m, k, p.option("activation"), *flags)
