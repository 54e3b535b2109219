"""Why a chain of linears does not go on from one module to the next."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from fastlinear.rewrite.match.links import Links

_DROPOUTS = (F.dropout, torch.dropout)


@dataclass(frozen=True)
class Stop:
    """Two linears, or modules that hold some, of which one reads the other, and why they are no
    part of one chain.

    Attributes:
        before, after: their names inside the parent.
        reason: what stands in the way, as part of a sentence.
    """

    before: str
    after: str
    reason: str


def stops_of(links: Links, allowed: Container[str], refused: Mapping[str, str]) -> list[Stop]:
    """The places in a traced forward where a chain would go on.

    Args:
        links: its linears; the forwards of modules it calls are part of it where they may be.
        allowed: names of the linears that may take part.
        refused: names of the modules that hold linears and are called → why.
    """
    found = []
    for node in links.graph.nodes:
        name = str(node.target)
        if node.op == "call_module" and (name in refused or links.linears.get(name) is node):
            ends = list(dict.fromkeys(_ends(links, node, refused, (), False)))
            if len(ends) == 1:
                after, met = ends[0]
                own = (_of_module(n, links, allowed, refused) for n in (name, after))
                reason = next((r for r in (*own, *met) if r is not None), None)
                if reason is not None:
                    found.append(Stop(name, after, reason))
    return found


def _of_module(
    name: str, links: Links, allowed: Container[str], refused: Mapping[str, str]
) -> str | None:
    if name in refused:
        return refused[name]
    return None if name in allowed else f"its linear {name!r} is left alone itself"


def _ends(
    links: Links, value: Node, refused: Mapping[str, str], met: tuple[str, ...], active: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What reads a value with nothing but one activation between: its name, and what is in the
    way of a chain."""
    if len(value.users) > 1:
        what = str(value.target) if value.op == "call_module" else value.name
        met = (*met, f"what {what!r} returns is read elsewhere as well")
    for user in value.users:
        name = str(user.target)
        if user.op == "call_module" and (name in refused or links.linears.get(name) is user):
            yield name, met
        elif links.passes(user, value):
            yield from _ends(links, user, refused, met, active)
        elif _draws(links, user):
            what = name if user.op == "call_module" else user.name
            drawn = (*met, f"in training dropout ({what!r}) draws numbers between them")
            yield from _ends(links, user, refused, drawn, active)
        elif not active and links.activation(user, value) is not None:
            yield from _ends(links, user, refused, met, True)


def _draws(links: Links, user: Node) -> bool:
    if user.op == "call_module":
        return isinstance(links.parent.get_submodule(str(user.target)), nn.Dropout)
    return user.op == "call_function" and user.target in _DROPOUTS
