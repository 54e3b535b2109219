"""What takes the place of linears on one value, or on its parts, in a traced forward."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from fastlinear.rewrite.match.links import Edit, Links, Replacement
from fastlinear.rewrite.rules.grouped.rows.forward import call_row
from fastlinear.rewrite.rules.grouped.rows.loop_forward import call_parts
from fastlinear.rewrite.rules.grouped.rows.traced import loop_of


def row(names: tuple[str, ...]) -> Edit:
    """Linears on one value, or on its parts, as one call."""

    def edit(links: Links) -> Replacement:
        nodes = tuple(links.linears[name] for name in names)
        loop = loop_of(links, names)

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
