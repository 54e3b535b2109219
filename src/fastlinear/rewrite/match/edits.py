"""What rewrites put in a traced forward in place of linears: one call each.

An edit names what it replaces. Which steps these are is found in the trace that is rewritten, as a
forward may be traced more than once: alone, and with the forwards of blocks that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.fx import Graph, Node

from fastlinear.rewrite.match.links import Edit, Links, Replacement, Run, only_user
from fastlinear.rewrite.swap.forwards import (
    call_chain_of,
    call_functional_linear_of,
    call_fused_chain,
    call_fused_linear,
)


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


def _call(function: Callable[..., Any], graph: Graph, root: Node, given: Sequence[Node]) -> Node:
    return graph.call_function(function, (root, *given))
