"""Linears of a traced forward that read one value, or its parts, and may be computed at once.

The first of them then computes all. So nothing between the first and the last may write to what
they read.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.node import Node

from fastlinear.profile.graph import IN_PLACE
from fastlinear.rewrite.swap.parts import exactly

_WRITING = IN_PLACE | {operator.setitem, operator.delitem}


def rows_of(
    parent: nn.Module, nodes: Iterable[Node], linears: Mapping[str, Node], allowed: Container[str]
) -> list[tuple[str, ...]]:
    """Names of the ``allowed`` linears that read one value, two or more, in the order of calls.

    Args:
        parent: the module traced.
        nodes: its graph.
        linears: the linears that are called once, by name, each with one argument.
        allowed: names of those that may take part.
    """
    found: dict[tuple[Any, bool], list[str]] = {}
    for name, node in linears.items():
        if name in allowed:
            bias = parent.get_submodule(name).bias is not None
            found.setdefault((node.args[0], bias), []).append(name)
    order = list(nodes)
    return [
        tuple(names)
        for names in found.values()
        if len(names) > 1 and not written(parent, order, linears, names)
    ]


@dataclass(frozen=True)
class Loop:
    """Linears on the parts of one value.

    Attributes:
        names: of the linears, by part.
        given: the parts, and the value.
    """

    names: tuple[str, ...]
    given: tuple[Node, Node]


def loops_of(
    parent: nn.Module, nodes: Iterable[Node], linears: Mapping[str, Node], allowed: Container[str]
) -> list[Loop]:
    """The ``allowed`` linears that read the parts of one value; arguments as for ``rows_of``."""
    found: dict[Node, dict[int, str]] = {}
    for name, node in linears.items():
        part = node.args[0]
        if name not in allowed or not isinstance(part, Node) or part.target is not operator.getitem:
            continue
        source, index = part.args
        if isinstance(source, Node) and isinstance(index, int) and _parted(source) is not None:
            found.setdefault(source, {})[index] = name
    order, loops = list(nodes), []
    for source, by_index in found.items():
        count = len(by_index)
        if count < 2 or sorted(by_index) != list(range(count)):
            continue
        names = sorted(by_index.values(), key=list(linears).index)
        if not written(parent, order, linears, names):
            whole = _parted(source)
            assert whole is not None
            loops.append(Loop(tuple(by_index[i] for i in range(count)), (source, whole)))
    return loops


def may_run_twice(parent: nn.Module, before: list[Node]) -> bool:
    """Whether what runs before a loop may, as it does where the parts turn out to be of another
    number and the class's own forward begins anew: nothing there writes, draws or is hooked."""
    for node in before:
        if may_write(parent, node) or draws(node):
            return False
        if node.op == "call_module":
            module = parent.get_submodule(str(node.target))
            own = type(module).__module__.rpartition(".")[2]
            hooked = module._forward_hooks or module._forward_pre_hooks
            stateless = own in ("linear", "activation", "normalization", "flatten")
            if not stateless or hooked or isinstance(module, nn.RReLU):
                return False
    return True


def draws(node: Node) -> bool:
    """Whether a step of a traced forward draws random numbers, by its name."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    drawn = ("dropout", "rand", "bernoulli", "multinomial", "normal", "rrelu", "gumbel", "uniform")
    if node.op not in ("call_function", "call_method"):
        return False
    return any(word in name for word in drawn)


def _parted(source: Node) -> Node | None:
    """The value whose chunks ``source`` holds, or None for anything else."""
    while source.target is exactly and isinstance(source.args[0], Node):
        source = source.args[0]
    known = source.target in (torch.chunk, torch.split) if source.op == "call_function" else False
    known |= source.op == "call_method" and source.target in ("chunk", "split")
    whole = source.args[0] if source.args else None
    return whole if known and isinstance(whole, Node) else None


def written(
    parent: nn.Module, order: list[Node], linears: Mapping[str, Node], names: list[str]
) -> bool:
    """Whether something between the first and the last may write to what they read."""
    start, stop = order.index(linears[names[0]]), order.index(linears[names[-1]])
    # linears' outputs but those they read, and what is made of nothing but those
    fresh = set(linears.values()) - behind(linears[name] for name in names)
    for node in order[start + 1 : stop]:
        if node in fresh:
            continue
        if node.all_input_nodes and fresh.issuperset(node.all_input_nodes):
            fresh.add(node)
        elif may_write(parent, node):
            return True
    return False


def behind(nodes: Iterable[Node]) -> set[Node]:
    """What these nodes' inputs are made of, the inputs included."""
    found: set[Node] = set()
    left = [value for node in nodes for value in node.all_input_nodes]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def may_write(parent: nn.Module, node: Node) -> bool:
    """Whether a step of a traced forward may write to what it reads."""
    target: Any = node.target
    if node.op == "call_method":
        return str(target).endswith("_")
    if node.op == "call_module":
        module = parent.get_submodule(str(target))
        known = type(module).__module__.startswith("torch.nn.")
        return not known or bool(getattr(module, "inplace", False))
    if node.op != "call_function":
        return False
    if target in _WRITING or str(getattr(target, "__name__", "_")).endswith("_"):
        return True
    return node.kwargs.get("out") is not None or _inplace(target, node)


def _inplace(target: Any, node: Node) -> bool:
    """Whether a function is asked to work in place."""
    if not inspect.isfunction(target):
        return bool(node.kwargs.get("inplace", False))
    try:
        given = inspect.signature(target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return True
    return bool(given.get("inplace", False))
