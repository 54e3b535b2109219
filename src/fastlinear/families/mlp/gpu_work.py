"""What each backend of mlp does in a call on a GPU, for its price."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

import torch

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import (
    bytes_us,
    capability,
    flops_per_us,
    fused,
    hosts,
    of_rows,
    on_device,
    rows_at,
    units,
)
from fastlinear.dispatch.select import select
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, call, flags_of
from fastlinear.families.linear import gpu_work as linear
from fastlinear.families.linear import problem as linear_act
from fastlinear.families.mlp import layerwise
from fastlinear.families.mlp.cuda import rows
from fastlinear.families.mlp.problem import NAME, PIECES, STEP, widths_of
from fastlinear.families.mlp.triton import config as triton
from fastlinear.fastpath.autograd_node import node_work

_OF_LAYERS = {"forward": ("forward",), "backward": linear_act.BACKWARD_PIECES}
_ROWS = 64  # of a block of ours
_BLOCK_SHARE, _GRID_SHARE = 0.3, 0.2  # of a multiprocessor's rate
_PART = 64  # columns in which Triton holds a width
_RESULTS = 4e4  # of a multiprocessor in a microsecond


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in the forward, the backward or a training step; None of backends that
    others registered."""
    if p.piece == STEP:
        return _step(p, backend)
    if backend == "rows_cuda":
        made = _rows(p)
        return None if made is None else (*hosts(p, backend, made), *made)
    if backend == "whole_triton":
        made = _whole_triton(p)
        return (*hosts(p, backend, made), *made)
    if backend == "whole_cuda":
        start = call(f"{NAME} {backend} {p.piece}")
        each = (w for layer in layerwise.layers_of(p) for w in _whole_cuda(layer, p.piece))
        return (*hosts(p, backend, (start,)), start, *each)
    if backend not in ("eager", "layerwise"):
        return None
    made = _layers(p, backend)
    return (*hosts(p, backend, made), *made)


def _rows(p: Problem) -> tuple[Work, ...] | None:
    """Launches of ``rows_cuda``: rows through the layers, then all gradients of weights."""
    m, widths, activation = p.dim("M"), widths_of(p), p.option("activation")
    backward = p.piece == "backward"
    steps = widths[::-1] if backward else widths
    keeps_pre = activation_of(activation).saved == "pre"
    staged = keeps_pre and (backward or p.needs_grad)
    config = rows.rows_for(m, steps, backward, staged, units())
    if config is None:
        return None
    name, hidden = f"{NAME} rows_cuda {p.piece}", sum(widths[1:-1])
    results = config.results_us(m, steps, backward, units())
    rest = config.microseconds(m, steps, backward, units()) - sum(results)
    kept = m * hidden * ((2 + keeps_pre) if backward else p.needs_grad)
    sizes = {"m": m, "numbers": kept, "kn": sum(k * n for k, n in pairwise(widths))}
    flags = flags_of(p, "w") + ("in two parts",) * (rows.blocks_of(max(steps[1:])) > rows.CHUNK)
    odd = [(k, n) for k, n in pairwise(widths) if k % 8]  # weights that are copied
    made = [
        call(name),
        Work(f"{name} rows", (rest**2 + bytes_us(p, kept) ** 2) ** 0.5, sizes, flags),
        Work(f"{name} results", results[0], {"numbers": m * hidden}, (), (activation,)),
        Work(
            f"{name} results",
            results[1],
            {"numbers": m * steps[-1]},
            (),
            () if backward else (p.option("final"),),
        ),
        fused(f"{name} read", p, m, steps[0], "none", times=1),
        fused(f"{name} written", p, m, steps[-1], "none", times=1),
    ]
    if odd:
        copied = sum(k * n for k, n in odd)
        made += [
            call(f"{name} copy"),
            Work(f"{name} copies", bytes_us(p, 2 * copied), {"numbers": copied}),
        ]
    if p.option("x") == "strided":
        copied = 2 * m * widths[0]
        made.append(Work(f"{name} turned x", bytes_us(p, copied), {"numbers": copied}))
    if backward:
        shares = rows.shares_for(m, tuple((n, k) for k, n in pairwise(widths)), units())
        summed = rows.grads_us(m, shares, units())
        read = bytes_us(p, m * (sum(widths) + hidden))
        made += [call(f"{name} grads"), Work(f"{name} grads", (summed**2 + read**2) ** 0.5, sizes)]
    return tuple(w for w in made if w.units)


def _layers(p: Problem, backend: str) -> tuple[Work, ...]:
    found: tuple[Work, ...] = ()
    known: dict[Problem, tuple[Work, ...]] = {}  # of equal layers one is looked at
    for layer in layerwise.layers_of(p):
        for piece in _OF_LAYERS[p.piece]:
            q = replace(layer, piece=piece)
            if q not in known:
                known[q] = _layer(q, backend)
            found += known[q]
    return found


def _layer(q: Problem, backend: str) -> tuple[Work, ...]:
    if backend == "eager":
        return linear.inner(q, "eager")
    return on_device(linear.work(q, select(q, ready=False).backend.name) or ())


def _step(p: Problem, backend: str) -> tuple[Work, ...] | None:
    if backend == "pieces":
        return of_pieces(p, PIECES, node_work(NAME))
    if backend != "eager":
        return None
    made = tuple(w for piece in PIECES for w in _layers(p.with_piece(piece), "eager"))
    return (*hosts(p, "eager", made), *made)


def _whole_triton(p: Problem) -> tuple[Work, ...]:
    """One launch: programs of a few rows that go through all layers; the backward's two more."""
    m, widths, name = p.dim("M"), widths_of(p), f"{NAME} whole_triton {p.piece}"
    backward = p.piece == "backward"
    dtype = getattr(torch, p.dtype)
    if backward:
        config = triton.backward_config(m, widths, dtype, units())
    else:
        config = triton.forward_config(m, widths, dtype, units(), capability())
    rows = ceil(ceil(m / config.block_m) / units()) * config.block_m  # of a multiprocessor
    rate, itemsize = flops_per_us(p, ours=True), FLOAT_DTYPES[p.dtype].itemsize
    padded = [sum(triton.parts_of(n, config.chunk)) for n in widths]
    mixed = ("mixed widths",) * (max(widths) > _PART > min(widths))
    flags = (f"rows of {config.block_m}", *mixed, *flags_of(p, "w"))
    made = [call(name)]
    for layer, (k, n) in zip(layerwise.layers_of(p), pairwise(padded), strict=True):
        sizes = {"m": m, "k": k, "n": n}
        aligned = (
            flag for flag, holds in of_rows(itemsize, (layer.dim("K"),), triton=True) if holds
        )
        made += [
            Work(f"{name} layer", 1.0, None, mixed),
            Work(
                f"{name} product",
                2 * rows * k * n / (rate * _BLOCK_SHARE),
                sizes,
                (*flags, *aligned),
            ),
            Work(
                f"{name} results",
                rows * n / _RESULTS,
                {"numbers": m * n},
                (),
                (layer.option("activation"),),
            ),
        ]
        if backward:
            moved = m * (layer.dim("K") + layer.dim("N"))
            us = ((2 * m * k * n / (rate * units())) ** 2 + bytes_us(p, moved) ** 2) ** 0.5
            made.append(Work(f"{name} grads", us, {"numbers": moved, "kn": k * n}))
    hidden = sum(widths[1:-1]) * (2 if backward else p.needs_grad)
    ends = ((widths[-1], ()), (widths[0], flags_of(p, "x") if not backward else ()))
    made += [fused(f"{name} ends", p, m, n, "none", *flag, times=1) for n, flag in ends]
    kept = m * hidden
    made += (
        [Work(f"{name} kept", bytes_us(p, kept), {"numbers": kept}, rows_at(p, widths[1]))]
        if kept
        else []
    )
    return tuple(made)


def _whole_cuda(layer: Problem, piece: str) -> tuple[Work, ...]:
    """A layer of a chain in one launch: all rows of a block, or the weights over the device."""
    m, k, n = (max(1, layer.dim(name)) for name in ("M", "K", "N"))
    kind, rate = f"{NAME} whole_cuda {piece}", flops_per_us(layer, ours=True)
    spread = 2 * (m + _ROWS) * k * n / (rate * _GRID_SHARE * units())
    us = spread + bytes_us(layer, k * n)
    rows = of_rows(FLOAT_DTYPES[layer.dtype].itemsize, (k, n))
    flags = (*(name for name, holds in rows if holds), *flags_of(layer, "x", "w"))
    return (
        Work(f"{kind} layer", 1.0, None, (layer.option("activation"),)),
        Work(f"{kind} product", us, {"m": m, "k": k, "n": n}, flags),
    )
