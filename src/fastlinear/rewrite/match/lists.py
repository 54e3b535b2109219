"""Linears of one list in a traced forward that do not wait for each other, of any sizes, so that
all of them may be one call.

Each is a parallel MLP of one layer: what is said there of the order of things holds here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.fx
from torch import nn
from torch.fx import Node

from fastlinear.rewrite.match.parallel_mlps import (
    Abreast,
    ParallelMLP,
    ParallelMLPs,
    parallel_mlp_of,
)
from fastlinear.rewrite.match.rows import behind
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS

LISTS = (nn.ModuleList, nn.ModuleDict)


class Lists(ParallelMLPs):
    """The linears of lists that may be computed together.

    Args:
        parent: the module traced.
        graph: its forward, children as leaves.
        pairs: a linear's name → the node that is an activation of its output, the only reader, and
            the activation's name.
        others: parallel MLPs that are computed together in the same forward.
    """

    def __init__(
        self,
        parent: nn.Module,
        graph: torch.fx.Graph,
        pairs: Mapping[str, tuple[Node, str]],
        others: Sequence[Abreast] = (),
    ) -> None:
        self.parent, self.order = parent, list(graph.nodes)
        self.left, self.found, self._pairs = {}, list(others), pairs
        self._called = self._calls()
        homes: dict[str, dict[Node, ParallelMLP]] = {}
        for name, node in self._called.items():
            mlp = parallel_mlp_of(name, parent.get_submodule(name), {})
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

    def _abreast(self, parallel_mlps: Mapping[Node, ParallelMLP]) -> Abreast:
        """With their activation, where all have the same and nothing else reads them."""
        made = super()._abreast(parallel_mlps)
        pairs = [self._pairs.get(mlp.name) for mlp in made.parallel_mlps]
        acts = {None if pair is None else pair[1] for pair in pairs}
        ends = tuple(pair[0] for pair in pairs if pair is not None)
        (activation, *more) = acts
        if more or activation is None:
            return made
        known = tuple(replace(t, activations=(activation,)) for t in made.parallel_mlps)
        return replace(made, parallel_mlps=known, ends=ends)
