"""Telling whether a module is a gated MLP and nothing else: by the trace of its forward, and by
what a copy of it makes of numbers that a trace says nothing of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import FOREIGN_ERRORS
from fastlinear.families.gated.stacking import split_pre
from fastlinear.nn.recognised import PLAIN, Gated, register
from fastlinear.rewrite.match.alone import (
    inputs,
    leaves_alone,
    same,
    traced_alone,
    undisturbed,
)
from fastlinear.rewrite.match.composed import returned
from fastlinear.rewrite.match.eligible import refuse_linear
from fastlinear.rewrite.match.halves import is_size
from fastlinear.rewrite.match.links import Links
from fastlinear.rewrite.match.projections import dropped_at
from fastlinear.rewrite.rules.gated.gates import Gate, Gates

_ANOTHER = "it computes something else, or more than that"


def recognise(module: nn.Module) -> Gated | str:
    """How the module computes a gated MLP of its one argument, or why it is not taken for one.

    Its linear layers must be its own children, plain ``nn.Linear`` that ``optimize_`` would take;
    besides them it may hold only modules without state. It must compute the same in training, but
    for a dropout of what the gate lets through.
    """
    why = _why_not_held(module)
    if why is not None:
        return why
    traces = traced_alone(module)
    if isinstance(traces, str):
        return traces
    (alone, graph), (_, in_training) = traces
    gate = _whole(alone, graph)
    if gate is None:
        return _ANOTHER
    rates = _dropped(traces[1][0], list(graph.nodes), list(in_training.nodes))
    if rates is None:
        return "it computes something else in training"
    behind = gate.nodes - gate.half.nodes if gate.half is not None else frozenset()
    if not behind.issuperset(rates) or len(rates) > 1:
        return "in training it drops other values than what the gate lets through"
    found = replace(gate.gated, dropout=max(rates.values(), default=0.0))
    return found if _computes(module, found) else _ANOTHER


register(Gated, recognise)


def _why_not_held(module: nn.Module) -> str | None:
    """Why what it holds is not that of a gated MLP."""
    layers = [name for name, child in module._modules.items() if type(child) in PLAIN]
    state = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, child in module._modules.items():
        if child is None:
            continue
        if name in layers:
            refusal = refuse_linear(module, name, child)
            if refusal is not None and refusal.code != "meta":
                return f"its layer {name!r} is no plain one: {refusal.reason.rstrip('.')}"
        else:
            state += [*child.named_parameters(), *child.named_buffers()]
    if state or not 1 <= len(layers) <= 3:
        return "it does not hold one to three nn.Linear layers and no other state"
    return None


def _whole(alone: nn.Module, graph: Graph) -> Gate | None:
    """The gated MLP that all of a forward computes, whatever its input's rank."""
    end, behind = returned(graph), set()
    while end is not None and end.all_input_nodes:
        if dropped_at(alone, end, end.all_input_nodes[0]) is None:
            break
        behind.add(end)
        end = end.all_input_nodes[0]
    for largest in Links(alone, graph, {}).once(Gates).found:
        for gate in (largest, largest.half):
            if gate is None or gate.end is not end or gate.given.op != "placeholder":
                continue
            known = {*gate.nodes, *behind}
            rest = [n for n in graph.nodes if n not in known and n.op[:3] in ("cal", "get")]
            own = all(name in alone._modules for name in gate.gated.names)
            if own and gate.why is None and gate.ranks is None and all(map(is_size, rest)):
                return gate
    return None


def _dropped(alone: nn.Module, nodes: list[Node], others: list[Node]) -> dict[Node, float] | None:
    """The steps of a forward that drop in training, each with its rate; None where training takes
    other steps.

    Args:
        alone: the module in training.
        nodes: its forward in evaluation.
        others: in training.
    """
    if len(nodes) != len(others):
        return None
    place = {node: i for same in (nodes, others) for i, node in enumerate(same)}
    found = {}
    for node, other in zip(nodes, others, strict=True):
        value = other.all_input_nodes[0] if other.all_input_nodes else None
        rate = None if value is None else dropped_at(alone, other, value)
        if rate:
            found[node] = rate
        given = (
            (n.args[:1], {}) if rate is not None else (n.args, n.kwargs) for n in (node, other)
        )
        one, two = (map_arg(args, place.__getitem__) for args in given)
        if (node.op, node.target) != (other.op, other.target) or one != two:
            return None
    return found


class _Spread(nn.Module):
    """In the place of a linear layer, of its sizes and without its products: each feature of the
    result is one of the input, scaled and shifted. Of float64."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.times = -(-layer.out_features // max(1, layer.in_features))

        def made() -> nn.Parameter:
            numbers = torch.randn(
                layer.out_features, generator=generator, dtype=torch.float64, device="cpu"
            )
            return nn.Parameter(numbers)

        self.weight = made()
        self.bias = None if layer.bias is None else made()

    def forward(self, x: Tensor) -> Tensor:
        wide = x if self.times == 1 else torch.cat([x] * self.times, -1)
        y = wide[..., : self.out_features] * self.weight
        return y if self.bias is None else y + self.bias


def _computes(module: nn.Module, gated: Gated) -> bool:
    """Whether it computes that of large numbers, such that are not finite, many rows and other
    ranks, too, with the gradients of a gated MLP."""
    with undisturbed() as generator:
        layers: dict[str, Any] = {n: module._modules[n] for n in gated.names}
        stubs = {name: _Spread(layer, generator) for name, layer in layers.items()}
        memo: dict[int, Any] = {id(layers[name]): stub for name, stub in stubs.items()}
        try:
            probe = copy.deepcopy(module, memo)
        except FOREIGN_ERRORS:
            return False
        held = [p for stub in stubs.values() for p in stub.parameters()]
        first, width = layers[gated.gate], max(a.out_features for a in layers.values())
        for training in (False, True):
            for part in probe.modules():
                part.training = training
            formula = _formula(stubs, gated, training)
            tried = inputs(first.in_features, width, generator)
            x = next(tried)
            if not (same(probe, formula, x, held) and leaves_alone(probe, x)):
                return False
            if not training and not all(same(probe, formula, x, held) for x in tried):
                return False
    return True


def _formula(stubs: dict[str, _Spread], gated: Gated, training: bool) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        up = None if gated.up is None else stubs[gated.up](x)
        gate, up = split_pre((stubs[gated.gate](x), up), gated.order)
        h: Tensor = activation_of(gated.activation).value(gate) * up
        if gated.down is None:
            return h
        y: Tensor = stubs[gated.down](F.dropout(h, gated.dropout, training))
        return y

    return run
