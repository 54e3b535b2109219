"""The order of steps in a traced forward: which may run earlier than written, or twice."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import Node

from fastlinear.profile.graph import IN_PLACE

_WRITING = IN_PLACE | {operator.setitem, operator.delitem}


def ordered(nodes: Sequence[Node], groups: Iterable[Sequence[Node]]) -> list[Node] | None:
    """The nodes with those of each group one after another where the first is, all they read
    before that; None where two groups wait for each other."""
    group_of = {node: group for group in groups for node in group}
    done: dict[Node, None] = {}
    under_way: set[Node] = set()

    def emit(node: Node) -> bool:
        """Depth first, without recursion: forwards may be long."""
        waiting = [(node, False)]
        while waiting:
            here, ready = waiting.pop()
            members = group_of.get(here, (here,))
            if here in done:
                continue
            if ready:
                done.update(dict.fromkeys(members))
                under_way.difference_update(members)
                continue
            if under_way.issuperset(members):
                return False
            under_way.update(members)
            waiting.append((here, True))
            given = dict.fromkeys(v for member in members for v in member.all_input_nodes)
            waiting += [(v, False) for v in reversed(given) if v not in done]
        return True

    return list(done) if all(emit(node) for node in nodes) else None


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
