"""What each backend of mlp does in a call on a GPU, for its price."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import bytes_us, flops_per_us, hosts, of_rows, on_device, units
from fastlinear.dispatch.select import select
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, call, flags_of
from fastlinear.families.linear import gpu_work as linear
from fastlinear.families.linear import problem as linear_act
from fastlinear.families.mlp import layerwise
from fastlinear.families.mlp.cuda import rows
from fastlinear.families.mlp.problem import NAME, PIECES, STEP, widths_of
from fastlinear.fastpath.autograd_node import node_work

_OF_LAYERS = {"forward": ("forward",), "backward": linear_act.BACKWARD_PIECES}
_WHOLE = ("whole_triton", "whole_cuda")
_ROWS = 64  # of a block of ours
_BLOCK_SHARE, _GRID_SHARE = 0.3, 0.2  # of a multiprocessor's rate
_PART = 64  # columns in which Triton holds a width
_LAYER_US = 0.5  # from a layer's last product to the next one's first
_BACKWARD = 3  # products of a layer for one of the forward


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in the forward, the backward or a training step; None of backends that
    others registered."""
    if p.piece == STEP:
        return _step(p, backend)
    if backend == "rows_cuda":
        made = _rows(p)
        return None if made is None else (*hosts(p, backend, made), *made)
    if backend in _WHOLE:
        mixed = max(widths_of(p)) > _PART > min(widths_of(p))
        each = (
            w for layer in layerwise.layers_of(p) for w in _whole(layer, p.piece, backend, mixed)
        )
        return (*hosts(p, backend, (start := call(f"{NAME} {backend} {p.piece}"),)), start, *each)
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
    name, hidden, flags = f"{NAME} rows_cuda {p.piece}", sum(widths[1:-1]), flags_of(p, "x", "w")
    moved = m * (widths[0] + widths[-1] + hidden * ((2 + keeps_pre) if backward else p.needs_grad))
    us = (config.microseconds(m, steps, backward, units()) ** 2 + bytes_us(p, moved) ** 2) ** 0.5
    sizes = {"m": m, "numbers": moved, "kn": sum(k * n for k, n in pairwise(widths))}
    odd = sum(k % 8 > 0 for k in widths[:-1])  # weights whose rows are copied
    made = [call(name), Work(f"{name} rows", us, sizes, flags, (activation,))]
    made += [call(f"{name} copy", odd)] if odd else []
    if p.option("x") == "strided":
        copied = 2 * m * widths[0]
        made.append(Work(f"{name} turned x", bytes_us(p, copied), {"numbers": copied}))
    if backward:
        shares = rows.shares_for(m, tuple((n, k) for k, n in pairwise(widths)), units())
        summed = rows.grads_us(m, shares, units())
        read = bytes_us(p, m * (sum(widths) + hidden))
        made += [call(f"{name} grads"), Work(f"{name} grads", (summed**2 + read**2) ** 0.5, sizes)]
    return tuple(made)


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


def _whole(layer: Problem, piece: str, backend: str, mixed: bool) -> tuple[Work, ...]:
    """A layer of a chain in one launch: all rows of a block, or the weights over the device.
    ``mixed``: next to narrow layers Triton keeps the weights of wide ones in registers."""
    m, k, n = (max(1, layer.dim(name)) for name in ("M", "K", "N"))
    kind, rate = f"{NAME} {backend} {piece}", flops_per_us(layer, ours=True)
    if backend == "whole_cuda":
        spread = 2 * (m + _ROWS) * k * n / (rate * _GRID_SHARE * units())
        us = spread + bytes_us(layer, k * n)
    else:
        block = 2 * _ROWS * k * n / (rate * _BLOCK_SHARE) + _LAYER_US
        waves = ceil(m / _ROWS / units())
        us = waves * block * (1 if piece == "forward" else _BACKWARD) + bytes_us(layer, m * n)
    rows = of_rows(FLOAT_DTYPES[layer.dtype].itemsize, (k, n))
    flags = (*(name for name, holds in rows if holds), *flags_of(layer, "x", "w"))
    flags += ("mixed widths",) * mixed
    return (
        Work(f"{kind} layer", 1.0, None, (layer.option("activation"),)),
        Work(f"{kind} product", us, {"m": m, "k": k, "n": n}, flags),
    )
