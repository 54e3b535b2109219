"""Parallel MLPs in a traced forward: Sequentials of linears and activations that do not wait for
each other, so that layer i of all of them may be one call.

All are computed where the first stands. What the others read is made before that, so nothing
between them may write, draw numbers or be a layer itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Node

from fastlinear.profile.effects import class_forward
from fastlinear.profile.recognise import recognise_module
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.match.links import Links
from fastlinear.rewrite.match.order import behind, draws, may_write, ordered, written
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS

_MOVED = ("activation", "normalization", "flatten")  # modules of torch.nn that hold no such state


@dataclass(frozen=True)
class ParallelMLP:
    """A Sequential of linears with activations between them.

    Attributes:
        name: the Sequential; all names are those inside the parent.
        linears: first to last.
        activations: behind each.
        sizes: (N, K) of each.
        others: the Sequential, those in it and what else stands in them.
    """

    name: str
    linears: tuple[str, ...]
    activations: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    others: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ParallelGroup:
    """Parallel MLPs of one parent that may be computed together.

    Attributes:
        parallel_mlps: in the order of their calls.
        shared: whether all read one value.
        nodes: their calls.
        ends: where the activation behind each is done, if that is not in the parallel MLP.
    """

    parallel_mlps: tuple[ParallelMLP, ...]
    shared: bool
    nodes: tuple[Node, ...]
    ends: tuple[Node, ...] = ()

    @property
    def activations(self) -> tuple[str, ...]:
        """Behind each layer."""
        return self.parallel_mlps[0].activations

    @property
    def listed(self) -> bool:
        """Whether they are the linears of a list, rather than Sequentials."""
        return self.parallel_mlps[0].linears == (self.parallel_mlps[0].name,)

    @property
    def equal(self) -> bool:
        """Whether all are of the same sizes."""
        return len({mlp.sizes for mlp in self.parallel_mlps}) == 1

    @property
    def names(self) -> tuple[str, ...]:
        """All linears, MLP by MLP."""
        return tuple(name for mlp in self.parallel_mlps for name in mlp.linears)


def parallel_mlp_of(
    name: str, module: nn.Module, known: dict[Any, str | None]
) -> ParallelMLP | str:
    """What a Sequential is as a parallel MLP, or why it is none. ``known`` keeps the activations of
    modules that were looked at."""
    linears: list[str] = []
    activations: list[str] = []
    sizes: list[tuple[int, int]] = []
    others: list[str] = []

    def add(path: str, child: nn.Module) -> str | None:
        refusal = None if type(child) in PLAIN_LINEARS else refuse_module(child)
        if refusal is not None:
            return f"{path!r}: {refusal.reason.rstrip('.')}"
        if type(child) in PLAIN_LINEARS:
            linears.append(path)
            activations.append("none")
            sizes.append(tuple(child.weight.shape))  # type: ignore[arg-type,union-attr]
            return None
        others.append(path)
        if _is_sequential(child):
            steps = (add(f"{path}.{n}" if path else n, c) for n, c in child._modules.items() if c)
            return next((why for why in steps if why is not None), None)
        if type(child) is nn.Identity or (type(child) is nn.Dropout and not child.training):
            return None
        found = _activation(child, known)
        if found is None or not activations or activations[-1] != "none":
            return f"{path!r} ({type(child).__name__}) is no activation behind a linear"
        activations[-1] = found
        return None

    why = add(name, module)
    if why is not None:
        return why
    if not linears:
        return "it holds no linear"
    return ParallelMLP(name, tuple(linears), tuple(activations), tuple(sizes), tuple(others))


def _activation(module: nn.Module, known: dict[Any, str | None]) -> str | None:
    facts = tuple(
        (k, v) for k, v in vars(module).items() if isinstance(v, bool | int | float | str)
    )
    key: Any = (type(module), facts)
    if type(module).__module__ != nn.ReLU.__module__:
        key = module
    if key not in known:
        found = recognise_module(module)
        known[key] = None if found is None else found.name
    return known[key]


def is_parallel_mlp(module: nn.Module) -> bool:
    """Whether it is a Sequential with a linear in it that holds nothing but leaves and Sequentials
    of such."""
    if not _is_sequential(module):
        return False
    inside = list(module.modules())
    plain = all(_is_sequential(m) or not m._modules for m in inside)
    return plain and any(type(m) in PLAIN_LINEARS for m in inside)


def _is_sequential(module: nn.Module) -> bool:
    return class_forward(module) is nn.Sequential.forward


class ParallelMLPs:
    """The parallel MLPs of a traced forward that may be computed together.

    Args:
        links: its linears.

    Attributes:
        found: what may be one call a layer.
        left: name of a parallel MLP → why it is not part of any of them, though others are like it.
    """

    def __init__(self, links: Links) -> None:
        self.parent, self.order = links.parent, list(links.graph.nodes)
        self.left: dict[str, str] = {}
        self.found: list[ParallelGroup] = []
        self._called = self._calls()
        known: dict[Any, str | None] = {}
        made = {
            n: parallel_mlp_of(name, self.parent.get_submodule(name), known)
            for name, n in self._called.items()
        }
        others = {n: behind([n]) for n, why in made.items() if isinstance(why, str)}
        for node, before in others.items():
            if before.isdisjoint(others) and not any(node in b for b in others.values()):
                self.left[str(node.target)] = str(made[node])
        parallel_mlps = {n: t for n, t in made.items() if isinstance(t, ParallelMLP)}
        self._before = {n: behind([n]) for n in parallel_mlps}
        alone: dict[Node, ParallelMLP] = {}
        for same in _sorted(parallel_mlps, lambda t: (t.activations, t.sizes)):
            alone |= self._level_by_level(same)
        for same in _sorted(alone, lambda t: t.activations):
            self._level_by_level(same)

    def like(self, group: ParallelGroup) -> ParallelGroup:
        """The same parallel MLPs as those of another trace of this forward."""
        calls = {str(n.target): n for n in self.order if n.op == "call_module"}
        nodes = tuple(calls[mlp.name] for mlp in group.parallel_mlps)
        ends = tuple(next(iter(node.users)) for node in nodes) if group.ends else ()
        return ParallelGroup(group.parallel_mlps, group.shared, nodes, ends)

    def _calls(self) -> dict[str, Node]:
        """The parallel MLPs that are called once, on one value."""
        counts = Counter(str(n.target) for n in self.order if n.op == "call_module")
        return {
            str(n.target): n
            for n in self.order
            if n.op == "call_module"
            and counts[str(n.target)] == 1
            and len(n.args) == 1
            and isinstance(n.args[0], Node)
            and not n.kwargs
            and self._may_be(str(n.target))
        }

    def _may_be(self, name: str) -> bool:
        return is_parallel_mlp(self.parent.get_submodule(name))

    def _level_by_level(self, parallel_mlps: Mapping[Node, ParallelMLP]) -> dict[Node, ParallelMLP]:
        """Look at parallel MLPs that do the same; those that stay alone come back."""
        level: dict[Node, int] = {}
        for node in parallel_mlps:
            waits = [level[n] for n in level if n in self._before[node]]
            level[node] = max(waits, default=-1) + 1
        alone: dict[Node, ParallelMLP] = {}
        for depth in range(max(level.values(), default=-1) + 1):
            nodes = [n for n in parallel_mlps if level[n] == depth]
            if len(nodes) < 2:
                alone |= {n: parallel_mlps[n] for n in nodes}
                continue
            why = self._why_not(nodes)
            if why is not None:
                self.left |= {str(n.target): why for n in nodes}
                continue
            self.found.append(self._group({n: parallel_mlps[n] for n in nodes}))
        return alone

    def _group(self, parallel_mlps: Mapping[Node, ParallelMLP]) -> ParallelGroup:
        shared = len({n.args[0] for n in parallel_mlps}) == 1
        return ParallelGroup(tuple(parallel_mlps.values()), shared, tuple(parallel_mlps))

    def _why_not(self, nodes: Sequence[Node]) -> str | None:
        """Why these must not be computed where the first of them is, or None."""
        order = ordered(self.order, [group.nodes for group in self.found])
        assert order is not None
        if ordered(order, [*(group.nodes for group in self.found), nodes]) is None:
            return "parallel MLPs wait for each other through others that are one call already"
        named = {str(n.target): n for n in nodes}
        mine = {str(n.target): n for n in order if n.op == "call_module"}
        own = [name for name in mine if name in named]
        if written(self.parent, order, {**self._linears(), **self._called}, own):
            return "something between their calls may write to what they read"
        start, stop = order.index(mine[own[0]]), order.index(mine[own[-1]])
        needed = behind(nodes)
        for node in order[start + 1 : stop]:
            if node in needed and node not in named.values():
                why = self._why_not_moved(node)
                if why is not None:
                    return why
        return None

    def _linears(self) -> dict[str, Node]:
        return {
            str(n.target): n
            for n in self.order
            if n.op == "call_module"
            and type(self.parent.get_submodule(str(n.target))) in PLAIN_LINEARS
        }

    def _why_not_moved(self, node: Node) -> str | None:
        """Why what a parallel MLP reads must not be made earlier, or None."""
        if may_write(self.parent, node) or draws(node):
            return f"{node.name!r}, which one of them reads, writes or draws numbers"
        if node.op == "call_module":
            module = self.parent.get_submodule(str(node.target))
            kind = type(module).__module__.rpartition(".")[2]
            asleep = type(module) is nn.Identity or kind in _MOVED
            if not asleep or isinstance(module, nn.RReLU) or refuse_module(module) is not None:
                return (
                    f"{str(node.target)!r}, a module that runs between them, makes what one reads"
                )
        return None


def _sorted(parallel_mlps: Mapping[Node, ParallelMLP], key: Any) -> list[dict[Node, ParallelMLP]]:
    found: dict[Any, dict[Node, ParallelMLP]] = {}
    for node, mlp in parallel_mlps.items():
        found.setdefault(key(mlp), {})[node] = mlp
    return list(found.values())
