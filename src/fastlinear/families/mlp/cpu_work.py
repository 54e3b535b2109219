"""What each backend of mlp does in a call on a CPU, for its price."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import select
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, fresh, host, passed, product, turned
from fastlinear.families.linear import cpu_work as linear
from fastlinear.families.linear import problem as linear_act
from fastlinear.families.mlp import layerwise
from fastlinear.families.mlp.problem import NAME, STEP, backward_of, keeps_hidden, widths_of
from fastlinear.fastpath.autograd_node import node_work

_KNOWN = ("eager", "layerwise", "whole_cpp", "pieces")
_OF_LAYERS = {"forward": ("forward",), "backward": linear_act.BACKWARD_PIECES}


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in the forward, the backward or a training step; None where
    nobody tells it."""
    if backend not in _KNOWN:
        return None
    if p.piece == STEP:
        return _step(p, backend)
    layers = layerwise.layers_of(p)
    if backend == "whole_cpp":
        own = host(f"{NAME} whole_cpp {p.piece}")
        each = [own, *(w for layer in layers for w in _whole(layer, p.piece))]
        made = tuple(each) if p.dtype == "float32" else _widened(p, each)
        strided = p.option("x") == "strided"
        return (*made, *turned(p.dim("M"), widths_of(p)[0], p.dtype)) if strided else made
    found = [host(f"{NAME} eager {p.piece}")]  # layerwise is a loop over layers as well
    known: dict[Problem, tuple[Work, ...]] = {}  # of equal layers one is looked at
    for layer in layers:
        for piece in _OF_LAYERS[p.piece]:
            q = replace(layer, piece=piece)
            if q not in known:
                known[q] = _layer(q, backend)
            found += known[q]
    return (*found, *_computed_again(p))


def _computed_again(p: Problem) -> tuple[Work, ...]:
    """Outputs of hidden layers that nobody kept for a backward."""
    if p.piece != "backward" or keeps_hidden(p):
        return ()
    again = activation_of(p.option("activation")).saved == "pre"
    hidden = layerwise.layers_of(p)[:-1] if again else ()
    return tuple(w for q in hidden for w in linear.activated(q))


def _widened(p: Problem, works: Iterable[Work]) -> tuple[Work, ...]:
    from fastlinear.dispatch import widened  # calls in float32 do without it

    return widened.inside(family(NAME), p, works)


def _layer(q: Problem, backend: str) -> tuple[Work, ...]:
    if backend == "eager":
        return linear.inner(q, "eager")
    return family(q.family).work_of(q, select(q, ready=False).backend.name) or ()


def _step(p: Problem, backend: str) -> tuple[Work, ...]:
    if backend != "eager":
        return of_pieces(p, node_work(NAME))
    found = [host(f"{NAME} autograd"), host(f"{NAME} autograd layer", p.dim("L"))]
    for q in (p.with_piece("forward"), backward_of(p.with_piece("backward"), "eager")):
        made = work(q, "eager")
        found += made[1:] if made else ()
    return tuple(found)


def _whole(layer: Problem, piece: str) -> tuple[Work, ...]:
    m, k, n = (layer.dim(name) for name in ("M", "K", "N"))
    name = f"{NAME} whole_cpp {piece}"
    bias = ("bias",) if layer.option("bias") == "yes" else ()
    return (
        *product(name, m, k, n, layer.dtype)[:1],
        *(fresh(m * n, layer.dtype) if layer.needs_grad else ()),
        *passed(f"{name} pass", m, n, layer.option("activation"), *bias),
    )
