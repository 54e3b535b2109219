"""What takes the place of a gated MLP in a traced forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, Node

from fastlinear.rewrite.match.eligible import linear_kind
from fastlinear.rewrite.match.links import Edit, Links, Replacement
from fastlinear.rewrite.rules.gated.forward import call_gate, call_gate_of, call_gate_on
from fastlinear.rewrite.rules.gated.gates import Gate, Gates


def gate(found: Gate, backend: str | None) -> Edit:
    """A gated MLP as one call."""

    def edit(links: Links) -> Replacement:
        here = links.once(Gates).like(found)
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


def _with_activations(links: Links, name: str) -> list[str]:
    """A child that a gated MLP no longer calls, and the activations in it."""
    children = links.parent.get_submodule(name)._modules.items()
    inner = [n for n, m in children if m is not None and linear_kind(m) is None]
    return [name, *(f"{name}.{n}" for n in inner)]
