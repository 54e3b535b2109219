"""Linears of a traced forward that read one value, or its parts, and may be computed at once.

The first of them then computes all. So nothing between the first and the last may write to what
they read.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fastlinear.rewrite.match.eligible import linear_kind
from fastlinear.rewrite.match.links import Links
from fastlinear.rewrite.match.order import written
from fastlinear.rewrite.swap.guard import exactly


def rows_of(links: Links, allowed: Container[str]) -> list[tuple[str, ...]]:
    """The ``allowed`` linears that read one value, two or more, in the order of calls."""
    found: dict[tuple[Any, bool], list[str]] = {}
    parent, linears = links.parent, {}
    for name, node in links.layers.items():
        layer = parent.get_submodule(name)
        if linear_kind(layer) == "linear":
            linears[name] = node
            if name in allowed:
                found.setdefault((node.args[0], layer.bias is not None), []).append(name)
    order = list(links.graph.nodes)
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


def loops_of(links: Links, allowed: Container[str]) -> list[Loop]:
    """The ``allowed`` linears that read the parts of one value, by part."""
    parent, linears = links.parent, links.layers
    found: dict[Node, dict[int, str]] = {}
    for name, node in linears.items():
        part = node.args[0]
        if name not in allowed or not isinstance(part, Node) or part.target is not operator.getitem:
            continue
        source, index = part.args
        if isinstance(source, Node) and isinstance(index, int) and _parted(source) is not None:
            found.setdefault(source, {})[index] = name
    order, loops = list(links.graph.nodes), []
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


def loop_of(links: Links, names: tuple[str, ...]) -> Loop | None:
    """The loop of these linears; None where they read one value."""
    return next((loop for loop in loops_of(links, names) if loop.names == names), None)


def _parted(source: Node) -> Node | None:
    """The value whose chunks ``source`` holds, or None for anything else."""
    while source.target is exactly and isinstance(source.args[0], Node):
        source = source.args[0]
    known = source.target in (torch.chunk, torch.split) if source.op == "call_function" else False
    known |= source.op == "call_method" and source.target in ("chunk", "split")
    whole = source.args[0] if source.args else None
    return whole if known and isinstance(whole, Node) else None
