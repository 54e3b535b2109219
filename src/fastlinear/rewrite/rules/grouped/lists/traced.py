"""Linears of one list in a traced forward that do not wait for each other, of any sizes, so that
all of them may be one call.

Each is a parallel MLP of one layer: what is said there of the order of things holds here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from torch.fx import Node

from fastlinear.rewrite.match.links import Links
from fastlinear.rewrite.match.order import behind
from fastlinear.rewrite.rules.grouped.parallel_mlps.traced import (
    ParallelGroup,
    ParallelMLP,
    ParallelMLPs,
    parallel_mlp_of,
)
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS

LISTS = (nn.ModuleList, nn.ModuleDict)


class Lists(ParallelMLPs):
    """The linears of lists that may be computed together.

    Those that are computed with parallel MLPs of the same forward are left out.
    """

    def __init__(self, links: Links) -> None:
        self.parent, self.order, self.left = links.parent, list(links.graph.nodes), {}
        others = links.once(ParallelMLPs).found
        self.found = list(others)
        # activations that are functions: the node, the only reader, and its name
        self._pairs = {n: p for n, p in links.pairs.items() if p[0].op != "call_module"}
        self._called = self._calls()
        homes: dict[str, dict[Node, ParallelMLP]] = {}
        for name, node in self._called.items():
            mlp = parallel_mlp_of(name, self.parent.get_submodule(name), {})
            assert isinstance(mlp, ParallelMLP)
            homes.setdefault(name.rpartition(".")[0], {})[node] = mlp
        self._before = {n: behind([n]) for n in self._called.values()}
        for linears in homes.values():
            self._level_by_level(linears)
        self.found = self.found[len(others) :]

    def _may_be(self, name: str) -> bool:
        home, _, key = name.partition(".")
        if not key or "." in key:  # of lists in lists no guard sees the lengths
            return False
        held = type(self.parent.get_submodule(home)) in LISTS
        return held and type(self.parent.get_submodule(name)) in PLAIN_LINEARS

    def _group(self, parallel_mlps: Mapping[Node, ParallelMLP]) -> ParallelGroup:
        """With their activation, where all have the same and nothing else reads them."""
        made = super()._group(parallel_mlps)
        pairs = [self._pairs.get(mlp.name) for mlp in made.parallel_mlps]
        acts = {None if pair is None else pair[1] for pair in pairs}
        ends = tuple(pair[0] for pair in pairs if pair is not None)
        (activation, *more) = acts
        if more or activation is None:
            return made
        known = tuple(replace(t, activations=(activation,)) for t in made.parallel_mlps)
        return replace(made, parallel_mlps=known, ends=ends)
