"""Telling whether a module computes act(x ∘ w ± b) and nothing else: by the trace of its forward,
of which every step is pointwise, and by what a copy of it makes of numbers.

Random parameters and inputs, large ones and such that are not finite, values and gradients; what
its own parameters hold does not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, permutations

import torch
from torch import Tensor, nn
from torch.fx import Graph

from fastlinear.activations.reference import NAMES
from fastlinear.core.errors import FOREIGN_ERRORS
from fastlinear.families.diagonal import reference
from fastlinear.nn.recognised import Scaling, register
from fastlinear.rewrite.match.alone import (
    inputs,
    leaves_alone,
    same,
    traced_alone,
    undisturbed,
)
from fastlinear.rewrite.match.halves import is_view, sizes_behind
from fastlinear.rewrite.match.written import is_pointwise

_SCALES = (1.0, 1e4, 1e-4)  # of the parameters
_ANOTHER = "it computes something else"


def recognise(module: nn.Module) -> Scaling | str:
    """How the module computes act(x ∘ w ± b) of its one argument, or why it is not taken for that.

    It may hold one or two parameters and nothing else, neither children nor buffers.
    """
    own = {name: p for name, p in module._parameters.items() if p is not None}
    alone = not any(True for _ in module.children()) and not module._buffers
    if not 1 <= len(own) <= 2 or not alone or not all(map(_is_vector, own.values())):
        return "it holds something else than one or two parameters with a number a feature"
    if len({p.shape[-1] for p in own.values()}) > 1:
        return "its parameters are of different sizes"
    traces = traced_alone(module)
    if isinstance(traces, str):
        return traces
    if not all(_is_pointwise(graph) for _, graph in traces):
        return "it does more than pointwise arithmetic"
    with undisturbed() as generator:
        try:
            probe = copy.deepcopy(module).to("cpu", torch.float64).requires_grad_(True)
        except FOREIGN_ERRORS:
            return "it cannot be copied"
        return _recognised(probe, tuple(own), generator)


register(Scaling, recognise)


def _is_vector(p: Tensor) -> bool:
    plain = type(p) is nn.Parameter and not p.is_meta and p.is_floating_point()
    return plain and p.dim() > 0 and 0 < p.numel() == p.shape[-1]


def _is_pointwise(graph: Graph) -> bool:
    """Whether every step is arithmetic, a view of all of a value, or a size that one is given."""
    known, sizes = set(), set()
    for node in graph.nodes:
        behind = sizes_behind(node) if is_view(node) else None
        if behind is not None:
            sizes |= behind
        if behind is not None or is_pointwise(node) or node.op[:3] != "cal":
            known.add(node)
    return known | sizes == {*graph.nodes}


def _recognised(
    probe: nn.Module, names: tuple[str, ...], generator: torch.Generator
) -> Scaling | str:
    candidates = list(_candidates(names))
    given = [probe.get_parameter(name) for name in names]
    dims, k = max(p.dim() for p in given), given[0].shape[-1]
    in_place = False
    for training in (False, True):
        probe.train(training)
        ran = 0
        tried = (x for x in inputs(k, k, generator) if x.dim() >= dims)
        for x, scale in zip(tried, cycle(_SCALES), strict=False):
            for p in given:  # those of a fresh LayerScale may all be equal, or 0
                p.data = scale * torch.randn(
                    p.shape, generator=generator, dtype=p.dtype, device="cpu"
                )
            left = leaves_alone(probe, x)
            if left is None:
                continue  # not for inputs of so many dimensions
            ran, in_place = ran + 1, in_place or not left
            candidates = [c for c in candidates if same(probe, _formula(probe, c), x, given)]
            if not candidates:
                return _ANOTHER
        if not ran:
            return "it fails on tensors of its features"
    return replace(candidates[0], in_place=in_place)


def _candidates(names: tuple[str, ...]) -> Iterator[Scaling]:
    for order in permutations(names):
        for activation in NAMES:
            if len(order) == 1:
                yield Scaling(activation, order[0])
            else:
                yield Scaling(activation, order[0], order[1])
                yield Scaling(activation, order[0], order[1], minus=True)


def _formula(probe: nn.Module, scaling: Scaling) -> Callable[[Tensor], Tensor]:
    w = probe.get_parameter(scaling.weight)
    b: Tensor | None = None if scaling.bias is None else probe.get_parameter(scaling.bias)
    b = -b if scaling.minus and b is not None else b
    return lambda x: reference.diagonal_linear(x, w, b, scaling.activation, None)
