"""What takes the place of parallel MLPs, or of a list, in a traced forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.fx import Graph, Node

from fastlinear.rewrite.match.links import Edit, Links, Replacement
from fastlinear.rewrite.rules.grouped.lists.forward import call_list
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import Way, call_parallel_mlps
from fastlinear.rewrite.rules.grouped.parallel_mlps.traced import ParallelGroup, ParallelMLPs


def parallel_mlps(group: ParallelGroup, way: Way) -> Edit:
    """Parallel MLPs, or the linears of a list, as one call each layer."""

    def edit(links: Links) -> Replacement:
        here = links.once(ParallelMLPs).like(group)
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


def _call_parallel_mlps(
    group: ParallelGroup, way: Way, graph: Graph, root: Node, given: Sequence[Node]
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
