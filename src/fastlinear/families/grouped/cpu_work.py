"""What each backend of groups does in a call on a CPU, for its price."""

from __future__ import annotations

from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, call, flags_of, fresh, host
from fastlinear.families.grouped.problem import NAME, PIECES, STEP
from fastlinear.fastpath.autograd_node import node_work

_KNOWN = ("eager", "baddbmm", "loop", "conv", "cpp", "together", "pieces")


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in a piece or a training step; None where
    nobody tells it."""
    if backend not in _KNOWN:
        return None
    if p.family == NAME and p.piece == STEP and backend != "eager":
        return of_pieces(p, node_work(NAME))
    return (host(f"{p.family} {backend} {p.piece}"), *inner(p, backend))


def inner(p: Problem, backend: str) -> tuple[Work, ...]:
    """The same without the call; groups are taken to have the mean size."""
    groups, k, n, m = (max(1, p.dim(name)) for name in ("G", "K", "N", "M"))
    filled = groups if p.family == NAME else min(groups, m)  # the others have no rows
    rows = m if p.family == NAME else m / filled
    sizes = {"m": rows, "k": k, "n": n, "kn": k * n, "mk": rows * k, "mn": rows * n}
    every = filled * rows
    sizes |= {"groups": filled, "rows": every, "mkn": every * k * n}
    sizes |= {"numbers": every * (k + n) + filled * k * n}
    if p.option("order") == "channels":
        sizes["length"] = p.dim("L")
    activation, layouts = p.option("activation"), flags_of(p, "order", "x", "w", "rows")
    flags = (*layouts, *flags_of(p, "bias"))
    name = f"{p.family} {backend} {p.piece}"
    narrow = tuple(f"{which}=1" for which, size in (("m", rows), ("k", k), ("n", n)) if size <= 1)
    return (
        call(f"{name} pass", 1.0, activation, *flags),
        call(f"{name} group", filled),
        *(() if filled == groups else (call(f"{name} empty group", groups - filled),)),
        Work(f"{name} product", every * k * n, sizes, layouts, (*flags_of(p, "order"), *narrow)),
        Work(
            f"{name} pass",
            every * n,
            {"numbers": every * n, "n": n},
            flags,
            (activation,),
        ),
        *(
            work
            for numbers in _results(p, every, groups)
            for work in fresh(numbers, p.dtype, kept=backend in ("cpp", "together"))
        ),
    )


def _results(p: Problem, rows: float, groups: float) -> tuple[float, ...]:
    """Numbers of each large result: y, dx and dW."""
    k, n = p.dim("K"), p.dim("N")
    forward, backward = (rows * n,), (rows * k, groups * k * n)
    return {PIECES[0]: forward, PIECES[1]: backward}.get(p.piece, (*forward, *backward))
