"""Linears in a traced forward: which activation follows each, and which follow each other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.fx
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from fastlinear.profile.recognise import recognise
from fastlinear.rewrite.match.eligible import linear_kind
from fastlinear.rewrite.match.on_parameters import written_in
from fastlinear.rewrite.match.order import ordered
from fastlinear.rewrite.match.projections import dropped_at

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """Linears that follow each other with nothing but activations between them.

    Attributes:
        linears: their names inside the parent, two or more.
        activation, final_activation: between the layers, and after the last.
    """

    linears: tuple[str, ...]
    activation: str
    final_activation: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Replacement:
    """A call in place of steps of a traced forward.

    Attributes:
        steps: what it computes.
        starts: steps of which the first makes the call: one, or several that do not wait for each
            other.
        call: (new graph, the parent, what the call is given) → the call.
        given: what the call is given.
        results: steps whose values are its items; empty where its result is the value of each step.
        hidden: further steps that nothing else reads.
        gathered: whether the starts move to the first of them, with all that they are given.
        not_called: modules without weights that are called no longer.
    """

    steps: frozenset[Node]
    starts: tuple[Node, ...]
    call: Callable[[torch.fx.Graph, Node, Sequence[Node]], Node]
    given: tuple[Node, ...]
    results: tuple[tuple[Node, ...], ...] = ()
    hidden: frozenset[Node] = frozenset()
    gathered: bool = False
    not_called: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Link:
    """What happens to one linear's output: ``inner`` nodes in order, the last of them, or the
    linear itself, read by the linear ``next`` alone; ``end`` is where its activation is done."""

    activation: str
    end: Node
    inner: tuple[Node, ...]
    next: str | None


Edit = Callable[["Links"], Replacement]
"""What is to be replaced, found in whichever trace of a forward is rewritten."""


class Links:
    """The linears of a traced forward that are called once.

    ``linears``: name → call; ``layers``: those of them that are modules, ``written``: those that
    are written on parameters, by the names of their weights; their call is the last step of theirs.
    ``pairs``: the linear's name → (activation node, activation name), for those read by one
    activation alone.

    Args:
        parent: the module traced.
        graph: its forward, children as leaves.
        modules: names inside the parent of activation modules → activation name.
    """

    def __init__(
        self, parent: nn.Module, graph: torch.fx.Graph, modules: Mapping[str, str]
    ) -> None:
        self.parent, self.graph, self.modules = parent, graph, modules
        called = [str(n.target) for n in graph.nodes if n.op == "call_module"]
        self.linears = {
            str(n.target): n
            for n in graph.nodes
            if self._is_linear(n) and called.count(str(n.target)) == 1
        }
        self.layers = dict(self.linears)
        self.written = written_in(parent, graph)
        self.linears |= {name: one.end for name, one in self.written.items()}
        self.begins = {name: self._begins(name) for name in self.linears}
        self._names = {node: name for name, node in self.begins.items()}
        self.pairs: dict[str, tuple[Node, str]] = {}
        for name, node in self.linears.items():
            user = only_user(node)
            found = None if user is None else self.activation(user, node)
            if user is not None and found is not None:
                self.pairs[name] = user, found
        self._known: dict[Any, Any] = {}
        self._links = {name: self._link(node) for name, node in self.linears.items()}

    def runs(self, allowed: Container[str]) -> list[Run]:
        """The chains among the ``allowed`` linears: the longest first taken out of every row of
        linears that follow each other."""
        found: list[Run] = []
        follows = {k.next for name, k in self._links.items() if name in allowed}
        for name in self._links:
            if name not in allowed or name in follows:
                continue
            row: list[str] = []
            here: str | None = name
            while here is not None and here in allowed:
                row.append(here)
                here = self._links[here].next
            found += self._cut(row)
        return found

    def once(self, look: Callable[[Links], T]) -> T:
        """``look(self)``, the first time it is asked for."""
        if look not in self._known:
            self._known[look] = look(self)
        known: T = self._known[look]
        return known

    def _cut(self, row: list[str]) -> list[Run]:
        """Runs of equal hidden activations in a row of linears."""
        best: tuple[int, int] = (0, 0)
        for start in range(len(row)):
            stop = start + 1
            first = self._links[row[start]].activation
            while stop < len(row) and self._links[row[stop - 1]].activation == first:
                stop += 1
            if stop - start > best[1] - best[0]:
                best = start, stop
        start, stop = best
        if stop - start < 2:
            return []
        linears = tuple(row[start:stop])
        activation, final = (self._links[linears[i]].activation for i in (0, -1))
        return [*self._cut(row[:start]), Run(linears, activation, final), *self._cut(row[stop:])]

    def fused(self, edits: Iterable[Edit]) -> tuple[torch.fx.Graph, tuple[str, ...]]:
        """The graph with these edits as calls, its first argument the parent, and the modules
        without weights that it no longer calls."""
        made = [edit(self) for edit in edits]
        replaced = {step: one for one in made for step in one.steps}
        hidden = {step for one in made for step in one.hidden}
        starts = {step for one in made for step in one.starts}
        order = ordered(list(self.graph.nodes), [one.starts for one in made if one.gathered])
        assert order is not None  # they are found in an order that there is
        graph = torch.fx.Graph()
        root = graph.placeholder("parent")
        copies: dict[Node, Node] = {}
        for node in order:
            if node in copies or node in hidden:
                continue
            if node in starts:
                one = replaced[node]
                call = one.call(graph, root, [copies[given] for given in one.given])
                copies.update(dict.fromkeys(one.steps, call))
                for i, steps in enumerate(one.results):
                    item = graph.call_function(operator.getitem, (call, i))
                    copies.update(dict.fromkeys(steps, item))
            elif node.op == "output":
                graph.output(torch.fx.node.map_arg(node.args[0], lambda n: copies[n]))
            else:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        return graph, tuple(dict.fromkeys(name for one in made for name in one.not_called))

    def steps(self, run: Run) -> list[Node]:
        """The steps that one call computes, without those that lead to the first linear."""
        *hidden, last = run.linears
        found = [self.linears[run.linears[0]]]
        found += [node for name in hidden for node in self._links[name].inner]
        found += [f[name] for name in run.linears[1:] for f in (self.begins, self.linears)]
        link = self._links[last]
        if link.end is not self.linears[last]:
            found += link.inner[: link.inner.index(link.end) + 1]
        return found

    def _begins(self, name: str) -> Node:
        """The node of a linear that reads what it is given."""
        return self.written[name].first if name in self.written else self.linears[name]

    def given(self, name: str) -> Node:
        """What a linear is given."""
        if name in self.written:
            return self.written[name].given
        given = self.linears[name].args[0]
        assert isinstance(given, Node)
        return given

    def path(self, name: str) -> Any:
        """Where a linear is: the names that lead to it, or how it is written on parameters."""
        return self.written[name].linear if name in self.written else tuple(name.split("."))

    def hidden(self, names: Iterable[str]) -> frozenset[Node]:
        """Parameters that these linears alone read."""
        return frozenset(
            n for name in names if name in self.written for n in self.written[name].inner
        )

    def passed_over(self, steps: Iterable[Node]) -> tuple[str, ...]:
        """The modules without weights that these steps call."""
        called = [str(node.target) for node in steps if node.op == "call_module"]
        return tuple(name for name in called if name not in self.linears)

    def _is_linear(self, node: Node) -> bool:
        return (
            node.op == "call_module"
            and len(node.args) == 1
            and isinstance(node.args[0], Node)
            and not node.kwargs
            and linear_kind(self.parent.get_submodule(str(node.target))) in ("linear", "conv1d")
        )

    def _link(self, linear: Node) -> _Link:
        here, end, activation = linear, linear, "none"
        inner: list[Node] = []
        while (user := only_user(here)) is not None:
            if user in self._names:
                return _Link(activation, end, tuple(inner), self._names[user])
            if not self.passes(user, here):
                found = self.activation(user, here) if activation == "none" else None
                if found is None:
                    break
                activation, end = found, user
            inner.append(user)
            here = user
        return _Link(activation, end, tuple(inner), None)

    def passes(self, user: Node, value: Node) -> bool:
        """Whether ``user`` hands ``value`` on as it is: an identity, a dropout that sleeps."""
        return dropped_at(self.parent, user, value) == 0.0

    def activation(self, user: Node, value: Node) -> str | None:
        """The activation ``user`` applies to ``value`` and to nothing else, or None."""
        if user.op == "call_module":
            alone = user.args == (value,) and not user.kwargs
            return self.modules.get(str(user.target)) if alone else None
        if not _reads_only(user, value):
            return None
        args, kwargs, target = tuple(user.args[1:]), dict(user.kwargs), user.target
        if user.op == "call_method":
            found = recognise(lambda t: getattr(t, str(target))(*args, **kwargs))
        elif user.op == "call_function" and callable(target):
            found = recognise(lambda t: target(t, *args, **kwargs))
        else:
            return None
        return None if found is None else found.name


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _reads_only(user: Node, value: Node) -> bool:
    """Whether ``value`` is the first argument and no other argument is a node."""
    rest: Any = pytree.tree_leaves((user.args[1:], user.kwargs))
    return user.args[:1] == (value,) and not any(isinstance(v, Node) for v in rest)
