"""Linears in a traced forward: which activation follows each, and which follow each other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from fastlinear.profile.recognise import recognise
from fastlinear.rewrite.exchange.forwards import (
    call_chain_of,
    call_fused_chain,
    call_fused_linear,
    call_held_of,
)
from fastlinear.rewrite.exchange.gated_forward import call_gate, call_gate_of, call_gate_on
from fastlinear.rewrite.exchange.list_forward import call_list
from fastlinear.rewrite.exchange.parts import call_parts
from fastlinear.rewrite.exchange.row_forward import call_row
from fastlinear.rewrite.exchange.tower_forward import Way, call_towers
from fastlinear.rewrite.match.eligible import linear_kind
from fastlinear.rewrite.match.gates import Gate, Gates, nodes_of
from fastlinear.rewrite.match.lists import Lists
from fastlinear.rewrite.match.on_parameters import written_in
from fastlinear.rewrite.match.projections import dropped_at
from fastlinear.rewrite.match.rows import Loop, loops_of, rows_of
from fastlinear.rewrite.match.towers import Abreast, Towers, ordered


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


@dataclass(frozen=True)
class Edit:
    """Steps of a traced forward, one after the other, that one call computes.

    Attributes:
        linear: the name inside the parent of the linear that comes first.
        steps: how many steps there are; each is all that reads the one before.
        call: (parent, what the linear is given) → what the last step returns.
    """

    linear: str
    steps: int
    call: Callable[..., Any]


@dataclass(frozen=True)
class _Link:
    """What happens to one linear's output: ``inner`` nodes in order, the last of them, or the
    linear itself, read by the linear ``next`` alone; ``end`` is where its activation is done."""

    activation: str
    end: Node
    inner: tuple[Node, ...]
    next: str | None


class Links:
    """The linears of a traced forward that are called once.

    ``linears``: name → call. ``written``: those of them that are written on parameters, by the
    names of their weights; their call is the last step of theirs. ``pairs``: the linear's name →
    (activation node, activation name), for those read by one activation alone.

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
        self._layers = dict(self.linears)
        self.written = written_in(parent, graph)
        self.linears |= {name: one.end for name, one in self.written.items()}
        self._first = {name: self._begins(name) for name in self.linears}
        self._names = {node: name for name, node in self._first.items()}
        self.pairs: dict[str, tuple[Node, str]] = {}
        for name, node in self.linears.items():
            user = _only_user(node)
            found = None if user is None else self.activation(user, node)
            if user is not None and found is not None:
                self.pairs[name] = user, found
        self._loops: dict[tuple[str, ...], Loop] = {}
        self._gates: Gates | None = None
        self._towers: Towers | None = None
        self._lists: Lists | None = None
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

    def rows(self, allowed: Container[str]) -> list[tuple[str, ...]]:
        """The ``allowed`` linears that read one value, in the order of calls."""
        plain = {
            name: node
            for name, node in self._layers.items()
            if linear_kind(self.parent.get_submodule(name)) == "linear"
        }
        return rows_of(self.parent, self.graph.nodes, plain, allowed)

    def loops(self, allowed: Container[str]) -> list[tuple[str, ...]]:
        """The ``allowed`` linears that read the parts of one value, by part."""
        found = loops_of(self.parent, self.graph.nodes, self._layers, allowed)
        self._loops |= {loop.names: loop for loop in found}
        return [loop.names for loop in found]

    def gates(self) -> Gates:
        """The gated MLPs there are."""
        if self._gates is None:
            self._gates = Gates(self.parent, self.graph, self.activation, self.written)
        return self._gates

    def towers(self) -> Towers:
        """The towers there are."""
        if self._towers is None:
            self._towers = Towers(self.parent, self.graph)
        return self._towers

    def lists(self) -> Lists:
        """The linears of lists there are that do not wait for each other."""
        if self._lists is None:
            functions = {n: p for n, p in self.pairs.items() if p[0].op != "call_module"}
            self._lists = Lists(self.parent, self.graph, functions, self.towers().found)
        return self._lists

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

    def fused(
        self,
        pairs: Mapping[str, str],
        backend: str | None,
        runs: Sequence[Run],
        chain_backend: str | None,
        rows: Sequence[tuple[str, ...]] = (),
        gates: Sequence[Gate] = (),
        gate_backend: str | None = None,
        towers: Sequence[tuple[Abreast, Way]] = (),
        edits: Sequence[Edit] = (),
    ) -> tuple[torch.fx.Graph, tuple[str, ...]]:
        """The graph with these pairs, runs, rows, gates, towers and edits as fused calls, its first
        argument the parent, and the modules without weights that it no longer calls."""
        graph = torch.fx.Graph()
        root = graph.placeholder("parent")
        copies: dict[Node, Node] = {}
        done: dict[Node, str] = {}
        hidden: set[Node] = set()  # parameters that a fused call reads itself
        for name in (*pairs, *(name for run in runs for name in run.linears)):
            done[self.linears[name]] = name
            if name in self.written:
                hidden |= self.written[name].inner
        done |= {self.pairs[name][0]: name for name in pairs if name in self.pairs}
        starts = {run.linears[0]: run for run in runs}
        firsts = {min(row, key=list(self.linears).index): row for row in rows}
        for run in runs:
            done |= dict.fromkeys(self._nodes(run), run.linears[0])
        for name in (*pairs, *starts):
            done.pop(self._first[name], None)  # there the call is made
        passed_over = []
        gated = nodes_of(gates)
        edited = {
            node: (edit, steps)
            for edit in edits
            for steps in (self._steps(edit),)
            for node in steps
        }
        hidden.update(*(gate.hidden for gate in gates))
        wanted: tuple[Any, ...]
        standing = {node: pair for pair in towers for node in pair[0].nodes}
        order = ordered(list(self.graph.nodes), [group for group, _ in towers])
        assert order is not None  # towers are found in an order that there is
        node: Any
        for node in order:
            name = self._names.get(node, str(node.target))
            if node in edited:
                edit, (begin, *_) = edited[node]
                if node is begin:
                    wanted = (root, copies[begin.args[0]])
                    copies[node] = graph.call_function(edit.call, wanted)
                elif node.op == "call_module":
                    passed_over.append(name)
                copies[node] = copies[begin]
                continue
            if node in gated:
                gate = gated[node]
                if node is gate.first:
                    held = gate.gated.gate, gate.gated.up, gate.gated.down
                    paths = tuple(None if n is None else self._path(n) for n in held)
                    given_it = copies[gate.given]
                    copies[node] = _call_gate(graph, root, gate, paths, given_it, gate_backend)
                copies[node] = copies[gate.first]
                if node.op == "call_module" and name not in gate.gated.names:
                    passed_over += self._not_called(name)
                continue
            if node in copies or node in hidden:
                continue  # a linear, or tower, that the first of its row has computed
            if node in standing:
                group, way = standing[node]
                given_they = [copies[n.all_input_nodes[0]] for n in group.nodes]
                made = _call_abreast(graph, root, group, way, given_they)
                for i, member in enumerate(group.nodes):
                    copies[member] = graph.call_function(operator.getitem, (made, i))
                copies.update((e, copies[n]) for e, n in zip(group.ends, group.nodes, strict=False))
                passed_over += [other for tower in group.towers for other in tower.others]
                continue
            if node.op == "output":
                graph.output(torch.fx.node.map_arg(node.args[0], lambda n: copies[n]))
            elif node in done:  # it happens inside the fused call
                copies[node] = copies[self._first[done[node]]]
                if node.op == "call_module" and name not in self.linears:
                    passed_over.append(name)
            elif node.op == "call_module" and name in firsts:
                row = firsts[name]
                if row in self._loops:
                    given = [copies[n] for n in self._loops[row].given]
                    made = graph.call_function(call_parts, (root, row, *given))
                else:
                    made = graph.call_function(call_row, (root, row, copies[node.args[0]]))
                for i, linear in enumerate(row):
                    part = graph.call_function(operator.getitem, (made, i))
                    copies[self.linears[linear]] = part
            elif node in self._names and name in starts:
                run = starts[name]
                names = run.activation, run.final_activation
                how = (*names, chain_backend)
                given_it = copies[self._given(name)]
                copies[node] = _call_chain(graph, root, self._paths(run), given_it, how)
            elif node in self._names and name in pairs and name in self.written:
                call = call_held_of(self.written[name].held)
                wanted = (root, copies[self._given(name)], pairs[name], backend)
                copies[node] = graph.call_function(call, wanted)
            elif node.op == "call_module" and name in pairs:
                child = graph.create_node("get_attr", name)
                copies[node] = graph.call_function(
                    call_fused_linear, (child, copies[node.args[0]], pairs[name], backend)
                )
            else:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        return graph, tuple(dict.fromkeys(passed_over))

    def _steps(self, edit: Edit) -> tuple[Node, ...]:
        """The steps that a call replaces, in order."""
        found = [self.linears[edit.linear]]
        for _ in range(edit.steps - 1):
            user = _only_user(found[-1])
            assert user is not None
            found.append(user)
        return tuple(found)

    def _not_called(self, name: str) -> list[str]:
        """What a gated MLP does not call of a child: the child, and the activations in it."""
        children = self.parent.get_submodule(name)._modules.items()
        inner = [n for n, m in children if m is not None and linear_kind(m) is None]
        return [name, *(f"{name}.{n}" for n in inner)]

    def _nodes(self, run: Run) -> list[Node]:
        """The nodes that one call replaces, the first linear's left out."""
        *hidden, last = run.linears
        found = [node for name in hidden for node in self._links[name].inner]
        found += [f[name] for name in run.linears[1:] for f in (self._first, self.linears)]
        link = self._links[last]
        if link.end is not self.linears[last]:
            found += link.inner[: link.inner.index(link.end) + 1]
        return found

    def _begins(self, name: str) -> Node:
        """The node of a linear that reads what it is given."""
        return self.written[name].first if name in self.written else self.linears[name]

    def _given(self, name: str) -> Node:
        """What a linear is given."""
        if name in self.written:
            return self.written[name].given
        given = self.linears[name].args[0]
        assert isinstance(given, Node)
        return given

    def _paths(self, run: Run) -> tuple[Any, ...]:
        """Where the linears of a run are, as ``call_fused_chain`` takes it."""
        return tuple(self._path(name) for name in run.linears)

    def _path(self, name: str) -> Any:
        """Where a linear is: the names that lead to it, or how it is written on parameters."""
        return self.written[name].held if name in self.written else tuple(name.split("."))

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
        while (user := _only_user(here)) is not None:
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


def _call_chain(
    graph: torch.fx.Graph, root: Node, paths: tuple[Any, ...], x: Node, how: tuple[Any, ...]
) -> Node:
    """One call for a chain."""
    if all(isinstance(path, tuple) for path in paths):
        return graph.call_function(call_fused_chain, (root, paths, x, *how))
    return graph.call_function(call_chain_of(paths), (root, x, *how))


def _call_gate(
    graph: torch.fx.Graph,
    root: Node,
    gate: Gate,
    paths: tuple[Any, ...],
    x: Node,
    backend: str | None,
) -> Node:
    """One call for a gated MLP."""
    call: Callable[..., Any] = call_gate
    if gate.ranks is not None and gate.apart is not None:
        call = call_gate_of(gate.ranks, gate.apart)
    how = gate.gated.activation, gate.gated.order, backend
    if all(path is None or isinstance(path, tuple) for path in paths):
        return graph.call_function(call, (root, paths, x, *how))
    return graph.call_function(call_gate_on(call, paths), (root, x, *how))


def _call_abreast(
    graph: torch.fx.Graph, root: Node, group: Abreast, way: Way, xs: Sequence[Node]
) -> Node:
    """One call for towers, or for the linears of a list."""
    names = tuple(tower.name for tower in group.towers)
    if group.listed:
        *home, _ = names[0].split(".")
        keys = tuple(name.rpartition(".")[2] for name in names)
        how = (tuple(home), keys, way.activations[0])
        return graph.call_function(call_list, (root, *how, *xs))
    layers = tuple(zip(*(tower.linears for tower in group.towers), strict=True))
    wanted = (root, names, layers, way.activations, way.kind, way.backend, *xs)
    return graph.call_function(call_towers, wanted)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _reads_only(user: Node, value: Node) -> bool:
    """Whether ``value`` is the first argument and no other argument is a node."""
    rest: Any = pytree.tree_leaves((user.args[1:], user.kwargs))
    return user.args[:1] == (value,) and not any(isinstance(v, Node) for v in rest)
