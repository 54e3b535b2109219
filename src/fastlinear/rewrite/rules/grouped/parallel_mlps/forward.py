"""Parallel MLPs: what a rewritten parent calls in place of several Sequentials of linears.

Layer i of all parallel MLPs is one call. The weights stay the layers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.activations.reference import widened
from fastlinear.core.calls import PLAIN
from fastlinear.families.grouped.op import grouped_linear
from fastlinear.families.grouped.unequal import unequal_linear
from fastlinear.rewrite.rules.grouped.modules.forward import layers_of, parameters_of, stacked
from fastlinear.rewrite.swap.forwards import overridden
from fastlinear.rewrite.swap.layered import LAYERED, Layered

LISTS, STACKED = "lists", "stacked"
_LAYOUT = "g ... k"

Layers = Sequence[Sequence[Any]]
"""For each layer what every parallel MLP has there, the first parallel MLP's first."""


@dataclass(frozen=True)
class Way:
    """How layer i of all parallel MLPs is one call.

    Attributes:
        activations: behind each layer.
        kind: ``LISTS``, one call of ``unequal_linear`` a layer, which reads the layers' own
            weights; or ``STACKED``, one of ``grouped_linear`` on weights laid together.
        backend: a forced backend of ``grouped_linear``, or None.
    """

    activations: tuple[str, ...]
    kind: str = LISTS
    backend: str | None = None


def call_parallel_mlps(
    parent: nn.Module,
    parallel_mlps: Sequence[str],
    linears: Sequence[Sequence[str]],
    activations: tuple[str, ...],
    kind: str,
    backend: str | None,
    *xs: Tensor,
) -> tuple[Tensor, ...]:
    """The parallel MLPs of these names inside ``parent``, each on its input (..., K), each (...,
    N), in the way that ``activations``, ``kind`` and ``backend`` name.

    Only while all linears (names inside the parent, by layer and parallel MLP) are plain and
    without hooks; otherwise each parallel MLP is called by itself.
    """
    held = [] if overridden() else [layers_of(parent, names) for names in linears]
    if held and all(layers is not None for layers in held):
        pairs = [parameters_of(layers) for layers in held if layers is not None]
        weights, biases = [w for w, _ in pairs], [b for _, b in pairs]
        way = Way(activations, kind, backend)
        if fit(xs, weights, biases, way):
            return parallel_layers(xs, weights, biases, way=way)
    return tuple(parent.get_submodule(n)(x) for n, x in zip(parallel_mlps, xs, strict=True))


def fit(xs: Sequence[Tensor], weights: Layers, biases: Layers, way: Way) -> bool:
    """Whether the linears take such inputs one after another, all of one dtype and device."""
    dtype, device = weights[0][0].dtype, weights[0][0].device
    autocast = torch.is_autocast_enabled(device.type)
    if autocast and widened(way.activations):
        return False  # what is cast there depends on the operations it is written in
    sizes = []
    for x in xs:
        if x.device != device or not (autocast or x.dtype is dtype) or not x.dim():
            return False  # the layers say what is wrong
        sizes.append(x.shape[-1])
    if way.kind == STACKED and any(x.shape != xs[0].shape for x in xs):
        return False
    for ws, bs in zip(weights, biases, strict=True):
        for g, (w, b) in enumerate(zip(ws, bs, strict=True)):
            if type(w) not in PLAIN or w.dim() != 2 or w.shape[1] != sizes[g]:
                return False
            for t in (w,) if b is None else (w, b):
                if type(t) not in PLAIN or t.dtype is not dtype or t.device != device:
                    return False
            if b is not None and b.shape != w.shape[:1]:
                return False
            sizes[g] = w.shape[0]
        if way.kind == STACKED and not _alike(ws, bs):
            return False
    return True


def _alike(weights: Sequence[Any], biases: Sequence[Any]) -> bool:
    same = all(w.shape == weights[0].shape for w in weights)
    return same and len({b is None for b in biases}) == 1


def parallel_layers(
    xs: Sequence[Tensor], weights: Layers, biases: Layers, *, way: Way
) -> tuple[Tensor, ...]:
    """Parallel MLPs whose layers ``fit``, each on its input; as one of torch's functions: a
    function mode sees the call whole."""
    if has_torch_function(xs):
        ys: tuple[Tensor, ...] = handle_torch_function(
            parallel_layers, xs, xs, weights, biases, way=way
        )
        return ys
    return layered(xs, weights, biases, way)[-1]


def layered(
    xs: Sequence[Tensor], weights: Layers, biases: Layers, way: Way
) -> list[tuple[Tensor, ...]]:
    """The same: what every layer gives, one result a parallel MLP."""
    found: list[tuple[Tensor, ...]] = []
    if way.kind == LISTS:
        hidden: Sequence[Tensor] = list(xs)
        for ws, bs, name in zip(weights, biases, way.activations, strict=True):
            hidden = unequal_linear(hidden, ws, bs, activation=name)
            found.append(tuple(hidden))
    else:
        first = xs[0]
        one = all(x is first for x in xs)
        h = first.expand(len(xs), *first.shape) if one else torch.stack(tuple(xs))
        for ws, bs, name in zip(weights, biases, way.activations, strict=True):
            together = stacked(ws, bs)
            assert together is not None
            h = grouped_linear(h, *together, name, _LAYOUT, backend=way.backend)
            found.append(h.unbind(0))
        apart: Any = torch.unbind_copy  # its annotation knows the call with out= alone
        found[-1] = apart(h)  # each writable by itself, as that of a parallel MLP of its own is
    found[-1] = _recorded(found[-1], xs, weights, biases)
    return found


LAYERED[parallel_layers] = Layered(
    activations=lambda *_, way: way.activations,
    results=lambda xs, weights, biases, way: layered(xs, weights, biases, way),
)


def _recorded(
    ys: Sequence[Tensor], xs: Sequence[Tensor], weights: Layers, biases: Layers
) -> tuple[Tensor, ...]:
    """The results; of frozen parallel MLPs on inputs without gradients there is nothing to
    record."""
    if not any(y.requires_grad for y in ys):
        return tuple(ys)
    own = (*weights, *biases)
    return tuple(
        y
        if x.requires_grad or any(at[g] is not None and at[g].requires_grad for at in own)
        else y.detach()
        for g, (x, y) in enumerate(zip(xs, ys, strict=True))
    )
