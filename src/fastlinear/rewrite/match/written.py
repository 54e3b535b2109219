"""Gates written out: what pointwise operations of a traced forward make of a gate's and an up
projection's output, as ``g * sigmoid(g) * u`` in any order.

Which activation of the gate it is, is found by computing it, not by the order of the operations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import FOREIGN_ERRORS
from fastlinear.fastpath.aten_steps import op_names
from fastlinear.profile.recognise import recognise

_NAMES = """
    mul multiply add sub subtract rsub div divide true_divide truediv neg negative pos pow square
    sqrt rsqrt reciprocal exp expm1 log log1p erf erfc expit logsigmoid softplus
"""
_SPACES = (operator, torch, F, torch.special)
_MOST = 24  # operations of a gate
_TOLERANCE = 1e-8


@dataclass(frozen=True, eq=False)
class Written:
    """Pointwise operations on the values of one or two nodes.

    Attributes:
        nodes: the operations, in the order of calls, whose last gives the value.
        given: the nodes whose values they are computed from, the one that is read first being
            first.
        known: those among them that are activations themselves → activation name.
    """

    nodes: tuple[Node, ...]
    given: tuple[Node, ...]
    known: Mapping[Node, str]

    @property
    def moved(self) -> int:
        """Numbers that they read and write for each number of the result."""
        return sum(len(n.all_input_nodes) + 1 for n in self.nodes)

    @property
    def alike(self) -> tuple[str, ...]:
        """What they call, in order."""
        return tuple(str(n.target) for n in self.nodes)

    def run(self, *values: Tensor) -> Tensor:
        """The operations on other values of ``given``, which are not written to."""
        kept = any(_writes(n) for n in self.nodes)
        known: dict[Node, Any] = {
            n: v.clone() if kept else v for n, v in zip(self.given, values, strict=True)
        }
        for n in self.nodes:
            target: Any = n.target
            args: Any = map_arg(n.args, known.__getitem__)
            kwargs: Any = map_arg(n.kwargs, known.__getitem__)
            if n in self.known:
                known[n] = activation_of(self.known[n]).value(args[0])
            elif n.op == "call_method":
                known[n] = getattr(args[0], target)(*args[1:], **kwargs)
            else:
                known[n] = target(*args, **kwargs)
        found: Tensor = known[self.nodes[-1]]
        return found

    def turned(self) -> Written:
        """The same with its two values the other way round."""
        return Written(self.nodes, self.given[::-1], self.known)

    def gate(self) -> str | None:
        """The activation it applies to its first value before it multiplies by the second; None
        where it computes anything else."""
        found = recognise(lambda t: self.run(t, torch.ones_like(t)))
        if found is None:
            return None
        act = activation_of(found.name).value
        try:
            same = all(_near(self.run(g, u), act(g) * u) for g, u in _pairs())
        except FOREIGN_ERRORS:
            return None
        return found.name if same else None


def written(
    end: Node,
    order: Sequence[Node],
    is_given: Callable[[Node], bool],
    activation: Callable[[Node], str | None],
) -> Written | None:
    """The pointwise operations that ``end`` is made by; None where it is made by anything else, or
    of more than two values.

    Args:
        end: an operation on two values.
        order: all nodes, in the order of calls.
        is_given: whether a node's value is one of those.
        activation: any other operation → the activation that it is ("none": it hands its input
            on), or None.
    """
    if len(end.all_input_nodes) != 2:
        return None
    found: set[Node] = set()
    given: dict[Node, None] = {}
    known: dict[Node, str] = {}
    todo = [end]
    while todo:
        here = todo.pop()
        if here in found or here in given:
            continue
        if is_given(here):
            given[here] = None
            if len(given) > 2:
                return None
            continue
        if not is_pointwise(here):
            name = activation(here)
            if name is None:
                return None
            known[here] = name
        found.add(here)
        if len(found) > _MOST:
            return None
        todo += here.all_input_nodes
    if len(given) != 2:
        return None
    return Written(tuple(n for n in order if n in found), tuple(given), known)


def is_pointwise(node: Node) -> bool:
    """Whether it is arithmetic or an activation, of each number on its own and without a bound."""
    if any(not isinstance(v, bool | int | float | str | None) for v in _constants(node)):
        return False
    if node.op == "call_method":
        named = node.target in _pointwise() and hasattr(Tensor, str(node.target))
        return named and isinstance(node.args[0], Node)
    return node.op == "call_function" and node.target in _functions()


@cache
def _pointwise() -> frozenset[str]:
    """Names of operations and activations, in place or not."""
    names = (*_NAMES.split(), *op_names())
    return frozenset(f"{i}{name}{_}" for name in names for i in ("", "i") for _ in ("", "_"))


@cache
def _functions() -> frozenset[Any]:
    found = (getattr(space, name, None) for space in _SPACES for name in _pointwise())
    return frozenset(f for f in found if f is not None)


@cache
def _operators_in_place() -> frozenset[Any]:
    names = (name for name in _pointwise() if name[0] == "i")
    return frozenset(getattr(operator, n) for n in names if hasattr(operator, n))


def _constants(node: Node) -> Iterator[Any]:
    """What an operation is given beside the values of nodes."""
    return (v for v in chain(node.args, node.kwargs.values()) if not isinstance(v, Node))


def _writes(node: Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_")
    named = str(getattr(node.target, "__name__", "")).endswith("_")
    return node.target in _operators_in_place() or named or bool(node.kwargs.get("inplace"))


def _pairs() -> Iterable[tuple[Tensor, Tensor]]:
    """Values of a gate, and of what it lets through: of either sign, small and large."""
    gate = torch.cat(
        [
            torch.linspace(-12.0, 12.0, 97, device="cpu"),
            torch.tensor([-50.0, 1e-3, 50.0], device="cpu"),
        ]
    ).double()
    steps = torch.linspace(-2.0, 2.0, len(gate), dtype=gate.dtype, device="cpu")
    for up in (steps.flip(0), steps.roll(31) * 1e3, steps.roll(67) * 1e-3, -torch.ones_like(gate)):
        yield gate, up
        yield gate.reshape(4, -1), up.reshape(4, -1)


def _near(a: Any, b: Tensor) -> bool:
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    atol = _TOLERANCE * float(b.abs().max())
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=atol)
