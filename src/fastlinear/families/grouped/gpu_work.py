"""What each backend of groups does in a call on a GPU, for its price."""

from __future__ import annotations

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import (
    LIBRARY,
    OURS,
    bytes_us,
    flops_per_us,
    of_rows,
    rows_at,
    tiled_us,
)
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, call, flags_of, host
from fastlinear.families.grouped.problem import NAME, PIECES, STEP

_LIBRARY = ("eager", "baddbmm", "loop", "conv")
_TRITON = ("triton", "together")
_KNOWN = (*_LIBRARY, *_TRITON, "weight_stationary", "packed_groups", "wide")
_PRODUCTS = {"forward": 1, "backward": 2, STEP: 3}


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in a piece or a training step; None of backends that others registered."""
    if p.family == NAME and p.piece == STEP:
        if backend == "pieces":
            return of_pieces(p, PIECES, work)
        each = (w for piece in PIECES for w in _device(p.with_piece(piece), "eager"))
        return (host(f"{NAME} autograd"), *each) if backend == "eager" else None
    if backend not in _KNOWN:
        return None
    name = f"{p.family} {backend} {p.piece}"
    group = (host(f"{name} group", p.dim("G")),) if _one_by_one(p, backend) else ()
    return (host(name), *group, *_device(p, backend))


def _one_by_one(p: Problem, backend: str) -> bool:
    """Whether groups are computed one after the other."""
    return backend == "loop" or (p.family != NAME and backend == "eager")


def _device(p: Problem, backend: str) -> tuple[Work, ...]:
    """Its part of the device; groups are taken to have the mean size."""
    groups, k, n, m = (max(1, p.dim(name)) for name in ("G", "K", "N", "M"))
    filled = groups if p.family == NAME else min(groups, m)  # the others have no rows
    each = m if p.family == NAME else max(1, m // filled)
    ours, alone = backend not in _LIBRARY, _one_by_one(p, backend)
    size, rate = FLOAT_DTYPES[p.dtype].itemsize, flops_per_us(p, ours=ours)
    us = tiled_us(each, k, n, size, rate, OURS if ours else LIBRARY, 1 if alone else filled, alone)
    us *= _PRODUCTS[p.piece] * (filled if alone else 1)
    every = filled * each * n
    sizes = {"m": each, "k": k, "n": n, "groups": filled, "mn": every, "mkn": every * k}
    channels = dict(p.options).get("order") == "channels"
    if channels:
        sizes["length"] = p.dim("L")
    options = [name for name in ("order", "x", "w", "rows") if name in dict(p.options)]
    layouts = (*flags_of(p, *options), *rows_at(p, k), *rows_at(p, n))
    more = (*flags_of(p, "bias"), *(rows_at(p, p.dim("L")) if channels else ()))
    rows = of_rows(size, (k, n), triton=backend in _TRITON)
    variants = (*(name for name, holds in rows if holds), *(("channels",) if channels else ()))
    activation, name = p.option("activation"), f"{p.family} {backend} {p.piece}"
    sweep = Work(
        f"{name} pass",
        bytes_us(p, 2 * every),
        {"numbers": every, "n": n},
        (*layouts, *more),
        (activation,),
    )
    return (
        call(name, 1.0, activation, *layouts, *more),
        *((call(f"{name} group", filled),) if alone or backend == "together" else ()),
        Work(f"{name} product", us, sizes, layouts, variants),
        sweep,
    )
