"""Linears of a traced forward that read one value, and may be computed at once.

The first of them then computes all. So nothing between the first and the last may write to what
they read.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Container, Iterable, Mapping
from typing import Any

from torch import nn
from torch.fx.node import Node

_WRITING = frozenset(
    {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv}
    | {operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand}
    | {operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.delitem}
)


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
        if len(names) > 1 and not _written(parent, order, linears, names)
    ]


def _written(
    parent: nn.Module, order: list[Node], linears: Mapping[str, Node], names: list[str]
) -> bool:
    """Whether something between the first and the last may write to what they read."""
    start, stop = order.index(linears[names[0]]), order.index(linears[names[-1]])
    fresh = set(linears.values())  # linears' outputs, and what is made of nothing but those
    for node in order[start + 1 : stop]:
        if node in fresh:
            continue
        if node.all_input_nodes and fresh.issuperset(node.all_input_nodes):
            fresh.add(node)
        elif _may_write(parent, node):
            return True
    return False


def _may_write(parent: nn.Module, node: Node) -> bool:
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
