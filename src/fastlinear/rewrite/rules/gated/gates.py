"""Gated MLPs in a traced forward: two linears of one value, or one that holds both halves, an
activation on one of them, and their product.

They are found by dataflow. What stands in the way of one call is told beside what is found, so that
a gated MLP that is left alone is left alone for a stated reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from fastlinear.nn.recognised import Gated
from fastlinear.profile import equations
from fastlinear.rewrite.match import halves, on_parameters
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.match.links import Links
from fastlinear.rewrite.match.order import may_write
from fastlinear.rewrite.match.projections import Projection, dropped_at, layer_of, written_on
from fastlinear.rewrite.match.sites import activation_of_module
from fastlinear.rewrite.match.written import Written, written

_PRODUCTS = {operator.mul, operator.imul, torch.mul, torch.multiply}
_PRODUCT_METHODS = {"mul", "mul_", "multiply", "multiply_"}
_GLU = {F.glu}
_CATS = {torch.cat, torch.concat, torch.concatenate}


@dataclass(frozen=True, eq=False)
class Gate:
    """A gated MLP, or a gated linear layer, in a traced forward.

    Attributes:
        gated: its linears by their names inside the parent.
        given: the value both halves read.
        first: the linear called first, where one call may take the place of all.
        nodes: what one call computes.
        end: the last of them, whose value the call gives.
        why: what stands in the way of one call, or None.
        half: the same without the down projection, where there is one.
        ranks: of the value read, at which the halves lie as ``gated`` says; None: at any.
        apart: (the linear's output, the value read) → the halves as the forward takes them; None
            where ``ranks`` is.
        opened: gate and up → what the gate lets through, as the forward writes it out; None where
            that is an activation and a product.
        written: those of its linears that are written on parameters, by name.
    """

    gated: Gated
    given: Node
    first: Node
    nodes: frozenset[Node]
    end: Node
    why: str | None
    half: Gate | None = None
    ranks: frozenset[int] | None = None
    apart: Callable[..., Any] | None = None
    opened: Written | None = None
    written: Mapping[str, on_parameters.Written] = field(default_factory=dict)

    @property
    def hidden(self) -> frozenset[Node]:
        """Parameters that it alone reads."""
        return frozenset(n for one in self.written.values() for n in one.inner)

    def holds_for(self, rank: int) -> bool:
        """Whether it is a gated MLP of values of this rank."""
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True, eq=False)
class _Half:
    """One factor of a product: its linear, its activation, the steps from the linear's output to
    it, the part of that output it is made of, or None for all, and the rate at which some of it is
    dropped."""

    linear: Projection
    activation: str
    nodes: tuple[Node, ...]
    part: Node | None
    drops: float = 0.0


_Product = tuple[
    Gated,
    list[Projection],
    list[Node],
    str | None,
    frozenset[int] | None,
    Callable[..., Any] | None,
]
"""A product of halves: how, its linears, what one call computes, what stands in the way of one;
ranks and halves as of a ``Gate``."""


class Gates:
    """The gated MLPs of a traced forward.

    Args:
        links: its linears.
    """

    def __init__(self, links: Links) -> None:
        self.parent, self.order = links.parent, list(links.graph.nodes)
        self._function = links.activation
        self._modules: dict[str, str | None] = {}
        layers = (layer_of(self.parent, n, self._of_module) for n in self.order)
        self._linears = {layer.node: layer for layer in layers if layer is not None}
        self._linears |= written_on(self.parent, links.written)
        self._firsts = {linear.first: linear for linear in self._linears.values()}
        self.found = _largest([gate for n in self.order if (gate := self._gate(n)) is not None])

    def like(self, gate: Gate) -> Gate:
        """The same gated MLP as one of another trace of this forward."""
        known = (g for whole in self.found for g in (whole, whole.half) if g is not None)
        return next(g for g in known if g.gated == gate.gated)

    def _gate(self, end: Node) -> Gate | None:
        """What the product ``end`` belongs to, or None where it is no gated MLP's."""
        found, opened = self._glu(end) or self._glu_of_two(end) or self._product(end), None
        if found is None:
            found, opened = self._written(end)
        if found is None:
            return None
        gated, linears, nodes, why, ranks, apart = found
        first = min((linear.first for linear in linears), key=self.order.index)
        last = max((linear.node for linear in linears), key=self.order.index)
        (given,) = {linear.given for linear in linears}
        how = ranks, apart, opened, _written(linears)
        made = Gate(gated, given, first, frozenset(nodes), end, why, None, *how)
        why = why or self._why_not(made, linears, last)
        made = replace(made, why=why)
        size = linears[0].sizes[1] // (1 if gated.up is not None else 2)
        behind = self._down(end, size, {linear.name for linear in linears})
        if behind is None:
            return made
        down, inner = behind
        whole = frozenset((*nodes, *inner, *down.nodes))
        return replace(
            made,
            gated=replace(gated, down=down.name),
            nodes=whole,
            end=down.node,
            half=made,
            written=_written([*linears, down]),
        )

    def _why_not(self, gate: Gate, linears: list[Projection], last: Node) -> str | None:
        for linear in linears:
            if not self._once(linear):
                return f"its linear {linear.name!r} is called more than once there"
        for node in gate.nodes:
            if node is not gate.end and not gate.nodes.issuperset(node.users):
                return f"{node.name!r}, a value between its products, is read elsewhere as well"
        start, stop = (self.order.index(n) for n in (gate.first, last))
        for node in self.order[start + 1 : stop]:
            if node not in gate.nodes | gate.hidden and may_write(self.parent, node):
                return f"{node.name!r} may write to its input between its products"
        return None

    def _once(self, linear: Projection) -> bool:
        if linear.written is not None:
            return True  # nothing else reads its parameters
        calls = (n for n in self.order if n.op == "call_module")
        modules = (self.parent.get_submodule(str(n.target)) for n in calls)
        return sum(any(m is linear.module for m in module.modules()) for module in modules) == 1

    # -------------------------------------------------------------------------------- factors

    def _product(self, node: Node) -> _Product | None:
        plain = (node.op == "call_function" and node.target in _PRODUCTS) or (
            node.op == "call_method" and node.target in _PRODUCT_METHODS
        )
        args = node.args
        if node.op == "call_function" and node.target is torch.einsum and args:
            plain, args = equations.is_product(args[0]), args[1:]
        if not plain or node.kwargs or len(args) != 2 or len(node.all_input_nodes) != 2:
            return None
        one, other = (self._half(factor) for factor in node.all_input_nodes)
        if one is None or other is None or (one.activation != "none" != other.activation):
            return None
        gate, up = (other, one) if other.activation != "none" else (one, other)
        return self._pair(gate, up, [*gate.nodes, *up.nodes, node])

    def _written(self, end: Node) -> tuple[_Product | None, Written | None]:
        """An activation that is written out, and the product, in any order of operations; and what
        these operations make of gate and up."""
        found = written(end, self.order, self._is_given, self._handed_on)
        if found is None:
            return None, None
        for how in (found, found.turned()):
            gate, up = (self._half(n) for n in how.given)
            if gate is not None and up is not None and (name := how.gate()) is not None:
                nodes = [*gate.nodes, *up.nodes, *how.nodes]
                return self._pair(replace(gate, activation=name), up, nodes), how
        return None, None

    def _is_given(self, node: Node) -> bool:
        """Whether it is a linear's output, or a part of one, before any activation."""
        if node not in self._linears and not halves.takes_part(node):
            return False
        half = self._half(node)
        return half is not None and half.activation == "none"

    def _handed_on(self, node: Node) -> str | None:
        """The activation that a call applies; "none" where it hands its input on as it is."""
        if len(node.all_input_nodes) != 1:
            return None
        (value,) = node.all_input_nodes
        asleep = dropped_at(self.parent, node, value) == 0.0
        return "none" if asleep else self._activation(node, value)

    def _pair(self, gate: _Half, up: _Half, nodes: list[Node]) -> _Product | None:
        """Two halves that ``nodes`` make a product of."""
        if gate.linear.node is up.linear.node:
            return self._stacked(gate, up, nodes)
        if gate.part is not None or up.part is not None or gate.linear.sizes != up.linear.sizes:
            return None
        if gate.linear.module is up.linear.module or gate.linear.given is not up.linear.given:
            return None
        gated = Gated(gate.linear.name, up.linear.name, None, "apart", gate.activation)
        gated, why = _dropping(gated, gate, up)
        return gated, [gate.linear, up.linear], nodes, why, None, None

    def _stacked(self, gate: _Half, up: _Half, nodes: list[Node]) -> _Product | None:
        if gate.part is None or up.part is None or gate.linear.activation != "none":
            return None
        linear = gate.linear
        given = linear.given
        if linear.sizes[1] % 2:
            return None
        found = halves.orders(gate.part, up.part, linear.node, given, linear.sizes)
        if len(set(found.values())) != 1:
            return None
        ranks = apart = None
        if len(found) < len(halves.RANKS):
            ranks = frozenset(found)
            apart = halves.halves_of(gate.part, up.part, linear.node, given)
        gated = Gated(linear.name, None, None, next(iter(found.values())), gate.activation)
        gated, why = _dropping(gated, gate, up)
        return gated, [linear], nodes, why, ranks, apart

    def _glu(self, node: Node) -> _Product | None:
        """``F.glu`` or ``nn.GLU`` behind a linear."""
        if len(node.all_input_nodes) != 1:
            return None
        (value,) = node.all_input_nodes
        linear, dim = self._linears.get(value), self._glu_along(node, value)
        if linear is None or linear.activation != "none" or linear.sizes[1] % 2 or dim is None:
            return None
        why = None if dim == -1 else "its halves are not taken along the last dimension, -1"
        half = _Half(linear, "sigmoid", linear.nodes, value, linear.drops)
        gated = Gated(linear.name, None, None, "up_gate", "sigmoid")
        gated, dropping = _dropping(gated, half, half)
        return gated, [linear], [*linear.nodes, node], why or dropping, None, None

    def _glu_of_two(self, node: Node) -> _Product | None:
        """``F.glu`` or ``nn.GLU`` of an up projection and a gate laid one behind the other."""
        if len(node.all_input_nodes) != 1:
            return None
        (both,) = node.all_input_nodes
        if both.op != "call_function" or both.target not in _CATS or not both.args:
            return None
        along = both.args[1] if len(both.args) > 1 else both.kwargs.get("dim", 0)
        laid = both.args[0]
        if not isinstance(laid, list | tuple) or len(laid) != 2 or along != -1:
            return None
        if self._glu_along(node, both) != -1:
            return None
        up, gate = (self._half(n) if isinstance(n, Node) else None for n in laid)
        if up is None or gate is None or not gate.activation == up.activation == "none":
            return None
        gate = replace(gate, activation="sigmoid")
        return self._pair(gate, up, [*gate.nodes, *up.nodes, both, node])

    def _glu_along(self, node: Node, value: Node) -> Any:
        """The dimension along which a node's ``glu`` of a value takes halves; None of another."""
        if node.op == "call_module":
            module: Any = self.parent.get_submodule(str(node.target))
            if type(module) is not nn.GLU or refuse_module(module) is not None:
                return None
            return module.dim
        if node.op == "call_function" and node.target in _GLU and node.args[:1] == (value,):
            return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)
        return None

    def _half(self, node: Node) -> _Half | None:
        """What a factor is made of, from its linear on; None where it is anything else."""
        activation, part, drops = "none", None, 0.0
        nodes: list[Node] = []
        sizes: set[Node] = set()
        while (linear := self._linears.get(node)) is None:
            if halves.takes_part(node) and (value := halves.source(node)) is not None:
                more = halves.sizes_behind(node)
                if more is None:
                    return None
                sizes |= more
                part = part or node
            elif part is not None or len(node.all_input_nodes) != 1:
                return None
            else:
                (value,) = node.all_input_nodes
                rate = dropped_at(self.parent, node, value)
                if rate is not None:
                    drops = max(drops, rate)
                else:
                    found = self._activation(node, value) if activation == "none" else None
                    if found is None:
                        return None
                    activation = found
            nodes.append(node)
            node = value
        if linear.activation != "none" != activation:
            return None
        if not halves.asked(sizes) <= {linear.node, linear.given, *nodes}:
            return None
        own = [n for n in sizes if linear.node in _behind(n)]
        if activation == "none":
            activation = linear.activation
        drops = max(drops, linear.drops)
        return _Half(linear, activation, (*linear.nodes, *reversed(nodes), *own), part, drops)

    def _down(
        self, end: Node, size: int, taken: set[str]
    ) -> tuple[Projection, tuple[Node, ...]] | None:
        """The linear that alone reads the product, and what it passes on the way."""
        here = end
        inner: list[Node] = []
        while len(here.users) == 1:
            (user,) = here.users
            linear = self._firsts.get(user)
            if linear is not None:
                fits = linear.sizes[0] == size and linear.activation == "none"
                fits = fits and not linear.drops and linear.given is here
                alone = self._once(linear) and linear.name not in taken
                return (linear, tuple(inner)) if fits and alone else None
            if dropped_at(self.parent, user, here) != 0.0:
                return None
            inner.append(user)
            here = user
        return None

    # -------------------------------------------------------------------------------- modules

    def _activation(self, node: Node, value: Node) -> str | None:
        if node.op == "call_module":
            alone = node.args == (value,) and not node.kwargs
            return self._of_module(str(node.target)) if alone else None
        return self._function(node, value)

    def _of_module(self, name: str) -> str | None:
        if name not in self._modules:
            self._modules[name] = activation_of_module(self.parent.get_submodule(name))
        return self._modules[name]


def _written(linears: Iterable[Projection]) -> dict[str, on_parameters.Written]:
    """Those written on parameters, by name."""
    return {one.name: one.written for one in linears if one.written is not None}


def _dropping(gated: Gated, gate: _Half, up: _Half) -> tuple[Gated, str | None]:
    """The same with the rate at which training drops of its halves, and what to say of that."""
    rate = max(gate.drops, up.drops)
    if not rate:
        return gated, None
    why = f"in training a dropout of {rate:g} is active between its products"
    return replace(gated, dropout=rate), why


def _largest(gates: list[Gate]) -> list[Gate]:
    """Without those that are a part of another: ``sigmoid(g) * u`` in ``g * (sigmoid(g) * u)``."""

    def part(gate: Gate, other: Gate) -> bool:
        able = gate.why is None and other.why is not None
        return gate is not other and gate.end in other.nodes and not able

    halves = [gate.half or gate for gate in gates]
    return [g for g, h in zip(gates, halves, strict=True) if not any(part(h, o) for o in halves)]


def _behind(node: Node) -> set[Node]:
    """What a computation of sizes reads, itself included."""
    found, todo = set(), [node]
    while todo:
        here = todo.pop()
        if here not in found:
            found.add(here)
            todo += here.all_input_nodes if here.op != "call_module" else ()
    return found
