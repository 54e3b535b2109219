"""What rewrites put in a traced forward in place of linears: one call each.

An edit names what it replaces. Which steps these are is found in the trace that is rewritten, as a
forward may be traced more than once: alone, and with the forwards of blocks that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.fx import Graph, Node

from fastlinear.rewrite.match.eligible import linear_kind
from fastlinear.rewrite.match.gates import Gate
from fastlinear.rewrite.match.links import Edit, Links, Replacement, Run, only_user
from fastlinear.rewrite.match.parallel_mlps import Abreast
from fastlinear.rewrite.swap.forwards import (
    call_chain_of,
    call_functional_linear_of,
    call_fused_chain,
    call_fused_linear,
)
from fastlinear.rewrite.swap.gated_forward import call_gate, call_gate_of, call_gate_on
from fastlinear.rewrite.swap.list_forward import call_list
from fastlinear.rewrite.swap.parallel_mlps_forward import Way, call_parallel_mlps
from fastlinear.rewrite.swap.parts import call_parts
from fastlinear.rewrite.swap.row_forward import call_row


def linear(name: str, activation: str, backend: str | None) -> Edit:
    """A linear, with the activation that alone reads it or with none, as one call."""

    def edit(links: Links) -> Replacement:
        start, steps = links.begins[name], {links.begins[name], links.linears[name]}
        if name in links.pairs:
            steps.add(links.pairs[name][0])
        held = links.written[name].linear if name in links.written else None

        def call(graph: Graph, root: Node, given: Sequence[Node]) -> Node:
            if held is not None:
                how = (root, *given, activation, backend)
                return graph.call_function(call_functional_linear_of(held), how)
            child = graph.create_node("get_attr", name)
            return graph.call_function(call_fused_linear, (child, *given, activation, backend))

        return Replacement(
            steps=frozenset(steps),
            starts=(start,),
            call=call,
            given=(links.given(name),),
            hidden=links.hidden([name]),
            not_called=links.passed_over(steps),
        )

    return edit


def chain(run: Run, backend: str | None) -> Edit:
    """A chain of linears as one call."""

    def edit(links: Links) -> Replacement:
        first = run.linears[0]
        steps = links.steps(run)
        paths = tuple(links.path(name) for name in run.linears)
        how = run.activation, run.final_activation, backend

        def call(graph: Graph, root: Node, given: Sequence[Node]) -> Node:
            if all(isinstance(path, tuple) for path in paths):
                return graph.call_function(call_fused_chain, (root, paths, *given, *how))
            return graph.call_function(call_chain_of(paths), (root, *given, *how))

        return Replacement(
            steps=frozenset((links.begins[first], *steps)),
            starts=(links.begins[first],),
            call=call,
            given=(links.given(first),),
            hidden=links.hidden(run.linears),
            not_called=links.passed_over(steps),
        )

    return edit


def steps_after(name: str, count: int, function: Callable[..., Any]) -> Edit:
    """A linear and the steps behind it, each all that reads the one before, as one call.

    Args:
        name: of the linear inside the parent.
        count: of the steps, the linear among them.
        function: (parent, what the linear is given) → what the last step returns.
    """

    def edit(links: Links) -> Replacement:
        steps = [links.linears[name]]
        for _ in range(count - 1):
            user = only_user(steps[-1])
            assert user is not None
            steps.append(user)
        return Replacement(
            steps=frozenset(steps),
            starts=(steps[0],),
            call=partial(_call, function),
            given=(links.given(name),),
            not_called=links.passed_over(steps),
        )

    return edit


def row(names: tuple[str, ...]) -> Edit:
    """Linears on one value, or on its parts, as one call."""

    def edit(links: Links) -> Replacement:
        nodes = tuple(links.linears[name] for name in names)
        loop = links.loop(names)

        def call(graph: Graph, root: Node, given: Sequence[Node]) -> Node:
            function = call_row if loop is None else call_parts
            return graph.call_function(function, (root, names, *given))

        return Replacement(
            steps=frozenset(nodes),
            starts=nodes,
            call=call,
            given=(links.given(names[0]),) if loop is None else loop.given,
            results=tuple((node,) for node in nodes),
        )

    return edit


def gate(found: Gate, backend: str | None) -> Edit:
    """A gated MLP as one call."""

    def edit(links: Links) -> Replacement:
        here = links.gates().like(found)
        names = here.gated.gate, here.gated.up, here.gated.down
        paths = tuple(None if name is None else links.path(name) for name in names)
        how = here.gated.activation, here.gated.order, backend
        function: Callable[..., Any] = call_gate
        if here.ranks is not None and here.apart is not None:
            function = call_gate_of(here.ranks, here.apart)

        def call(graph: Graph, root: Node, given: Sequence[Node]) -> Node:
            if all(path is None or isinstance(path, tuple) for path in paths):
                return graph.call_function(function, (root, paths, *given, *how))
            return graph.call_function(call_gate_on(function, paths), (root, *given, *how))

        called = [str(node.target) for node in here.nodes if node.op == "call_module"]
        others = [name for name in called if name not in here.gated.names]
        return Replacement(
            steps=here.nodes | {here.first},
            starts=(here.first,),
            call=call,
            given=(here.given,),
            hidden=here.hidden,
            not_called=tuple(n for name in others for n in _with_activations(links, name)),
        )

    return edit


def parallel_mlps(group: Abreast, way: Way) -> Edit:
    """Parallel MLPs, or the linears of a list, as one call each layer."""

    def edit(links: Links) -> Replacement:
        here = links.parallel_mlps().like(group)
        results = zip(here.nodes, here.ends, strict=True) if here.ends else zip(here.nodes)
        return Replacement(
            steps=frozenset((*here.nodes, *here.ends)),
            starts=here.nodes,
            call=partial(_call_parallel_mlps, group, way),
            given=tuple(node.all_input_nodes[0] for node in here.nodes),
            results=tuple(results),
            gathered=True,
            not_called=tuple(other for mlp in group.parallel_mlps for other in mlp.others),
        )

    return edit


def _call(function: Callable[..., Any], graph: Graph, root: Node, given: Sequence[Node]) -> Node:
    return graph.call_function(function, (root, *given))


def _call_parallel_mlps(
    group: Abreast, way: Way, graph: Graph, root: Node, given: Sequence[Node]
) -> Node:
    names = tuple(mlp.name for mlp in group.parallel_mlps)
    if group.listed:
        *home, _ = names[0].split(".")
        keys = tuple(name.rpartition(".")[2] for name in names)
        how = (tuple(home), keys, way.activations[0])
        return graph.call_function(call_list, (root, *how, *given))
    layers = tuple(zip(*(mlp.linears for mlp in group.parallel_mlps), strict=True))
    wanted = (root, names, layers, way.activations, way.kind, way.backend, *given)
    return graph.call_function(call_parallel_mlps, wanted)


def _with_activations(links: Links, name: str) -> list[str]:
    """A child that a gated MLP no longer calls, and the activations in it."""
    children = links.parent.get_submodule(name)._modules.items()
    inner = [n for n, m in children if m is not None and linear_kind(m) is None]
    return [name, *(f"{name}.{n}" for n in inner)]
