"""What each backend of groups does in a call on a GPU, for its price."""

from __future__ import annotations

from dataclasses import replace

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import (
    LIBRARY,
    OURS,
    bytes_us,
    flops_per_us,
    hosts,
    of_rows,
    rows_at,
    tiled,
    tiled_us,
    units,
)
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, call, flags_of, host
from fastlinear.families.grouped.problem import NAME, PIECES, STEP
from fastlinear.fastpath.autograd_node import node_work

_LIBRARY = ("eager", "baddbmm", "loop", "conv")
_TRITON = ("triton", "together")
_KNOWN = (*_LIBRARY, *_TRITON, "weight_stationary", "packed_groups", "wide")


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in a piece or a training step; None of backends that others registered."""
    if p.family == NAME and p.piece == STEP:
        if backend == "pieces":
            return of_pieces(p, PIECES, work, node_work(NAME))
        made = tuple(w for piece in PIECES for w in _device(p.with_piece(piece), "eager"))
        return (*hosts(p, backend, made), *made) if backend == "eager" else None
    if backend not in _KNOWN:
        return None
    sliced = p.family == "ragged_linear" and backend == "eager"
    made = _one_by_one(p) if sliced else _device(p, backend)
    if p.piece == STEP and backend != "eager":
        name = f"{p.family} {backend}"  # lists of groups are walked by Python
        listed = (host(f"{name} group", p.dim("G")),) if backend == "together" else ()
        return (host(name), *listed, *made)
    return (*hosts(p, backend, made), *made)


def _alone(p: Problem, backend: str) -> bool:
    """Whether each group is a product of its own, one after the other."""
    return backend == "loop" or (p.family != NAME and backend == "eager")


def _one_by_one(p: Problem) -> tuple[Work, ...]:
    """Products of slices of x, whose sizes the host reads: nobody measured the device alone."""
    groups, k, n, m = (max(1, p.dim(name)) for name in ("G", "K", "N", "M"))
    filled = min(groups, m)
    each = _products(p.piece, max(1, m // filled), k, n)
    found = (w for sizes in each for w in tiled("torch", p, *sizes))
    return tuple(replace(w, units=w.units * filled) for w in found)


def _products(piece: str, m: int, k: int, n: int) -> tuple[tuple[int, int, int], ...]:
    """The products of a group: of the forward, and of dx and dW."""
    forward, backward = ((m, k, n),), ((m, n, k), (n, m, k))
    return {"forward": forward, "backward": backward, STEP: forward + backward}[piece]


def _device(p: Problem, backend: str) -> tuple[Work, ...]:
    """Its part of the device; groups are taken to have the mean size."""
    groups, k, n, m = (max(1, p.dim(name)) for name in ("G", "K", "N", "M"))
    filled = groups if p.family == NAME else min(groups, m)  # the others have no rows
    each = m if p.family == NAME else max(1, m // filled)
    ours, alone = backend not in _LIBRARY, _alone(p, backend)
    size, rate = FLOAT_DTYPES[p.dtype].itemsize, flops_per_us(p, ours=ours)
    tiles, at_once = OURS if ours else LIBRARY, 1 if alone else filled
    us = sum(
        tiled_us(*sizes, size, rate, tiles, at_once, alone or (ours and sizes[1] == each), units())
        for sizes in _products(p.piece, each, k, n)
    ) * (filled if alone else 1)  # ours split the sums over tokens
    every = filled * each * n
    sizes = {"m": each, "k": k, "n": n, "groups": filled, "mn": every, "mkn": every * k}
    channels = dict(p.options).get("order") == "channels"
    if channels:
        sizes["length"] = p.dim("L")
    options = [name for name in ("order", "x", "w", "rows") if name in dict(p.options)]
    layouts = (*flags_of(p, *options), *rows_at(p, k), *rows_at(p, n))
    more = (*flags_of(p, "bias"), *(rows_at(p, p.dim("L")) if channels else ()))
    rows = of_rows(size, (k, n), triton=backend in _TRITON)
    ways = (*rows, ("channels", channels), ("m=1", each == 1), ("n=1", n == 1))
    variants = tuple(name for name, holds in ways if holds)
    step = (STEP,) if p.piece == STEP else ()  # of one kernel with the forward
    activation = p.option("activation")
    name = f"{p.family} {backend}" + ("" if p.family != NAME else f" {p.piece}")
    sweep = Work(
        f"{name} pass",
        bytes_us(p, 2 * every),
        {"numbers": every, "n": n},
        (*layouts, *more),
        (activation, *step),
    )
    return (
        call(name, 1.0, activation, *layouts, *more, *step),
        *((call(f"{name} group", filled),) if alone or backend == "together" else ()),
        Work(f"{name} product", us, sizes, layouts, (*variants, *step)),
        sweep,
    )
