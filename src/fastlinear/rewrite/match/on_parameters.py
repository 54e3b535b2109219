"""Linears that a traced forward writes on parameters: ``F.linear``, ``torch.addmm``, or a product
with a weight, by ``torch.einsum`` too, and a bias added to it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, Node

from fastlinear.profile import equations
from fastlinear.rewrite.swap.functional_linear import ADDMM, EINSUM, LINEAR, SUM, FunctionalLinear

_PRODUCTS: set[Any] = {operator.matmul, torch.matmul, torch.mm, "matmul", "mm"}
_SUMS: set[Any] = {operator.add, operator.iadd, torch.add, "add", "add_"}
_TURNS: set[Any] = {torch.t, "t"}
_SWAPS: set[Any] = {torch.transpose, "transpose"}
_TURNED = {"T", "mT"}
_FACTS = {"shape", "ndim", "dtype", "device", "is_cuda"}


@dataclass(frozen=True, eq=False)
class Written:
    """One linear written on parameters.

    Attributes:
        linear: where its parameters are, and how it is written.
        given, first, end: what it reads, the first node that reads it, and its result.
        inner: its parameters, and their transposes, where it alone reads them.
        turns: the transpose of its weight, if it reads that.
    """

    linear: FunctionalLinear
    given: Node
    first: Node
    end: Node
    inner: frozenset[Node]
    turns: frozenset[Node]

    @property
    def name(self) -> str:
        """What it is called: as its weight is, inside the parent."""
        return ".".join(self.linear.weight)


def written_in(parent: nn.Module, graph: Graph) -> dict[str, Written]:
    """The linears of a traced forward written on parameters that nothing else there reads, by the
    names of their weights inside the parent."""
    known = dict(parent.named_parameters())
    read: dict[str, set[Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            readers = (user for user in node.users if not _asks(user))
            read.setdefault(str(node.target), set()).update(readers)
    found = (_written(node, known) for node in graph.nodes)
    return {one.name: one for one in found if one is not None and _alone(one, read)}


def _alone(one: Written, read: dict[str, set[Node]]) -> bool:
    """Whether nothing else reads its parameters."""
    own = {one.first, one.end, *one.turns}
    paths = (path for path in (one.linear.weight, one.linear.bias) if path is not None)
    readers = [read[".".join(path)] for path in paths]
    readers += [{user for user in turn.users if not _asks(user)} for turn in one.turns]
    return all(found <= own for found in readers)


@dataclass(frozen=True)
class _Factor:
    """A parameter as a product reads it: (K, N), or its transpose."""

    name: str
    sizes: tuple[int, ...]
    turned: bool
    nodes: tuple[Node, ...]


def _written(node: Node, known: dict[str, nn.Parameter]) -> Written | None:
    x: Any
    weight: Any
    bias: Any = None
    end, form = node, LINEAR
    equation = _equation(node)
    if node.op == "call_function" and node.target is F.linear:
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        x, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
    elif node.op == "call_function" and node.target is torch.addmm:
        if node.kwargs or len(node.args) != 3:
            return None
        (bias, x, weight), form = node.args, ADDMM
    elif _calls(node, _PRODUCTS) and not node.kwargs and len(node.args) == 2:
        (x, weight), form = node.args, SUM
    elif equation is not None:
        x, weight, form = node.args[1 + equation.x], node.args[2 - equation.x], EINSUM
    else:
        return None
    factor = _factor(weight, known)
    if factor is None or not isinstance(x, Node):
        return None
    # F.linear takes (N, K), a product (K, N)
    takes_nk = form == LINEAR if equation is None else not equation.turned
    turned = factor.turned is takes_nk
    n = factor.sizes[1 if turned else 0]
    if form in (SUM, EINSUM):
        end, bias = _with_bias(node, n, known)
    if bias is not None and not _is_bias(bias, n, known):
        return None
    inner = {*factor.nodes, *([] if bias is None else [bias])}
    if x in inner:
        return None
    while left := {n for n in inner if not set(n.users) <= inner | {node, end}}:
        inner -= left  # something else asks for its shape
    path = None if bias is None else tuple(str(bias.target).split("."))
    linear = FunctionalLinear(tuple(factor.name.split(".")), path, turned, form, equation)
    turns = frozenset(n for n in factor.nodes if n.op != "get_attr")
    return Written(linear, x, node, end, frozenset(inner), turns)


def _equation(node: Node) -> equations.Linear | None:
    """What linear an einsum of two operands is."""
    plain = node.op == "call_function" and node.target is torch.einsum and len(node.args) == 3
    return equations.linear(node.args[0]) if plain and not node.kwargs else None


def _factor(value: Any, known: dict[str, nn.Parameter]) -> _Factor | None:
    """A two-dimensional parameter, or its transpose."""
    nodes: list[Node] = []
    while isinstance(value, Node) and len(nodes) < 2:
        nodes.append(value)
        if value.op == "get_attr":
            name = str(value.target)
            if name not in known or known[name].dim() != 2:
                return None
            return _Factor(name, tuple(known[name].shape), len(nodes) == 2, tuple(nodes))
        if not _turns(value):
            return None
        value = value.args[0]
    return None


def _turns(node: Node) -> bool:
    rest = node.args[1:]
    if node.kwargs:
        return False
    if node.op == "call_function" and node.target is getattr:
        return rest[0] in _TURNED
    if _calls(node, _TURNS):
        return not rest
    return _calls(node, _SWAPS) and {int(d) % 2 for d in rest if isinstance(d, int)} == {0, 1}


def _with_bias(product: Node, n: int, known: dict[str, nn.Parameter]) -> tuple[Node, Node | None]:
    """Where the bias is added that alone reads a product, and the bias."""
    if len(product.users) == 1:
        (user,) = product.users
        if _calls(user, _SUMS) and not user.kwargs and len(user.args) == 2:
            one, other = user.args
            if one is product and _is_bias(other, n, known):
                return user, other  # type: ignore[return-value]
            if other is product and user.target in (operator.add, torch.add):
                return (user, one) if _is_bias(one, n, known) else (product, None)  # type: ignore[return-value]
    return product, None


def _is_bias(value: Any, n: int, known: dict[str, nn.Parameter]) -> bool:
    if not isinstance(value, Node) or value.op != "get_attr":
        return False
    found = known.get(str(value.target))
    return found is not None and tuple(found.shape) == (n,)


def _asks(node: Node) -> bool:
    """Whether it only asks what a tensor is like."""
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _FACTS
    return node.op == "call_method" and node.target in ("size", "dim", "numel")


def _calls(node: Node, targets: set[Any]) -> bool:
    """Whether it is a call of one of these functions, or methods."""
    return node.op in ("call_function", "call_method") and node.target in targets
