"""The halves of a linear's output in a traced forward: slices, chunks, splits and views of it.

Which they are is found by taking them: of an output whose numbers are known, at each rank, and of
ones that are large beyond any bound along one of their dimensions.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fastlinear.families.gated.stacking import STACKED, halves

RANKS = (1, 2, 3, 4)
"""Of values whose halves are looked at."""
_PARTS = {operator.getitem, torch.chunk, torch.split, torch.tensor_split, torch.unbind}
_PARTS |= {torch.narrow, torch.select, torch.unflatten, torch.hsplit, torch.reshape, torch.flatten}
_PART_METHODS = {"chunk", "split", "tensor_split", "unflatten", "unbind", "narrow", "select"}
_PART_METHODS |= {"hsplit", "view", "reshape", "flatten"}
_VIEWS: set[Any] = {"view", "reshape", "flatten", "unflatten"}
_VIEWS |= {torch.reshape, torch.flatten, torch.unflatten}
_SIZES = {operator.floordiv, operator.mul, operator.add, operator.sub, operator.neg}
_SIZE_METHODS = {"size", "dim"}
_LEAST, _LARGE = (2, 3, 5), 1 << 40  # of the dimensions before the last
_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def takes_part(node: Node) -> bool:
    """Whether ``node`` may take a part of its first argument, or look at it in another shape."""
    if node.op == "call_method":
        return node.target in _PART_METHODS
    return node.op == "call_function" and node.target in _PARTS


def is_view(node: Node) -> bool:
    """Whether ``node`` looks at all of its first argument in another shape."""
    return node.target in _VIEWS and takes_part(node)


def source(node: Node) -> Node | None:
    """What a node that takes a part takes it of."""
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None


def sizes_behind(node: Node) -> set[Node] | None:
    """The nodes that compute the numbers ``node`` is given besides its first argument, from shapes;
    None where it reads anything else."""
    first = source(node)
    found: set[Node] = set()
    if node.kwargs and any(True for _ in _nodes_in(node.kwargs)):
        return None
    todo = [n for n in _nodes_in(node.args[1:]) if n is not first]
    if first is not None and first in _nodes_in(node.args[1:]):
        return None
    while todo:
        here = todo.pop()
        if here in found:
            continue
        if not is_size(here):
            return None
        found.add(here)
        if not _asks_shape(here):
            todo += here.all_input_nodes
    return found


def asked(sizes: set[Node]) -> set[Node]:
    """The values whose shapes these nodes ask for."""
    return {n for node in sizes if _asks_shape(node) for n in node.all_input_nodes}


def orders(
    gate: Node, up: Node, linear: Node, given: Node, sizes: tuple[int, int]
) -> dict[int, str]:
    """How gate and up lie in the output of ``linear`` by the rank of that: each rank at which these
    two nodes are its halves.

    Args:
        linear, given: the linear's call and what it reads.
        sizes: its features, in and out.
    """
    found = {}
    for rank in RANKS:
        order = _order(gate, up, linear, given, sizes, rank)
        if order is not None:
            found[rank] = order
    return found


def taken(end: Node, known: dict[Node, Any]) -> Any:
    """The value of ``end`` where these nodes have these values."""
    if end in known:
        return known[end]
    if not (takes_part(end) or is_size(end)):
        raise LookupError(end.name)

    def value(n: Node) -> Any:
        return taken(n, known)

    args, kwargs = map_arg(end.args, value), map_arg(end.kwargs, value)
    target: Any = end.target
    if end.op == "call_method":
        found = getattr(args[0], target)(*args[1:], **kwargs)
    else:
        found = target(*args, **kwargs)
    known[end] = found
    return found


def halves_of(gate: Node, up: Node, linear: Node, given: Node) -> Callable[..., Any]:
    """(the linear's output, what it read) → the gate's half and the up projection's, taken as the
    forward takes them."""

    def run(both: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        known: dict[Node, Any] = {linear: both, given: x}
        return taken(gate, known), taken(up, known)

    return run


def _order(
    gate: Node, up: Node, linear: Node, given: Node, sizes: tuple[int, int], rank: int
) -> str | None:
    names, size = list(STACKED), sizes[1]
    for lead in _leads(rank):
        large = max(lead, default=0) >= _LARGE
        if large:  # shapes and places alone
            strides = (*(0 for _ in lead), 1)
            probe = torch.empty_strided((*lead, size), strides, device="meta")
        else:
            probe = torch.arange(size, device="cpu").expand(*lead, size)
        x = torch.empty((), device="meta").expand(*lead, sizes[0])
        known: dict[Node, Any] = {linear: probe, given: x}
        try:
            with torch.no_grad():
                parts = taken(gate, known), taken(up, known)
        except _FAILURES:
            return None
        alike = _same_place if large else _equal
        expected = {name: halves(probe, None, name, rank - 1) for name in names}
        names = [n for n, (a, b) in expected.items() if alike(parts[0], a) and alike(parts[1], b)]
    return names[0] if len(names) == 1 else None


def _leads(rank: int) -> Iterator[tuple[int, ...]]:
    """The dimensions before the last: small ones, then each of them larger than any bound."""
    small = _LEAST[: rank - 1]
    yield small
    for i in range(rank - 1):
        yield (*small[:i], _LARGE, *small[i + 1 :])


def _equal(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.equal(a, b)


def _same_place(a: Any, b: Tensor) -> bool:
    if not isinstance(a, Tensor) or a.shape != b.shape:
        return False
    return a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def is_size(node: Node) -> bool:
    """Whether it asks for a shape, or may compute with such numbers."""
    if node.op == "call_method":
        return node.target in _SIZE_METHODS
    if node.op != "call_function":
        return False
    return _asks_shape(node) or node.target in _SIZES or node.target is operator.getitem


def _asks_shape(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _SIZE_METHODS
    return node.target is builtins.getattr and node.args[1:] in (("shape",), ("ndim",))


def _nodes_in(values: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(values, found.append)
    return found
