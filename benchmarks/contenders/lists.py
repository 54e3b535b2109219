"""The work of layers that differ from group to group: tensors, a unit of work, oracle, cost.

Shared by experiments ``ragged`` (numbers of rows differ) and ``unequal`` (features differ).
Whatever form a contender's tensors have, its results are judged as those of the groups, one behind
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.case import Case
from benchmarks.harness.peer import Peer
from benchmarks.harness.work import AnyWork, Unit
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import KINKED, silent_at_kinks
from fastlinear.core.cost import Cost

Tensors = tuple[Tensor, ...]
Forward = Callable[..., Sequence[Tensor]]
"""The inputs of a form → its activated outputs."""


@dataclass(frozen=True)
class Lists:
    """One input set by group: x (M, K), weight (N, K), bias (N,), dy (M, N); no biases at all: ().

    Attributes:
        whole: the same as a contender takes them that knows no lists; () where there is no such.
    """

    xs: Tensors
    weights: Tensors
    biases: Tensors
    dys: Tensors
    whole: Tensors = ()

    @property
    def bytes(self) -> int:
        """Bytes of all groups that own rows."""
        owners = [g for g, x in enumerate(self.xs) if len(x)]
        kinds = (self.xs, self.weights, self.biases, self.dys)
        return sum(kind[g].nbytes for kind in kinds if kind for g in owners)


@dataclass(frozen=True)
class Form:
    """A set as a contender takes it.

    Attributes:
        inputs: what is differentiated, in order.
        dys: one gradient an output.
    """

    inputs: Tensors
    dys: Tensors


@dataclass(frozen=True)
class ListsWork(AnyWork):
    """The tensors of a case and how a unit of work runs over them."""

    case: Case
    stacks: tuple[Lists, ...]
    cold: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that are judged."""
        if not self.case.needs_grad:
            return ("output",)
        names = ("output", "grad.x", "grad.weight", "grad.bias")
        return names if self.stacks[0].biases else names[:3]

    def unit(self, lay: Callable[[Lists], Form], forward: Forward) -> Unit:
        """Drive a contender's forward; it returns outputs and gradients in its own form.

        A gradient of what took no part is empty.
        """
        forms = [lay(given) for given in self.stacks]
        leaves = [
            tuple(t.detach().requires_grad_(self.case.needs_grad) for t in form.inputs)
            for form in forms
        ]
        if not self.case.needs_grad:
            return lambda i: tuple(forward(*leaves[i]))

        def run(i: int) -> Tensors:
            ys = tuple(forward(*leaves[i]))
            found = torch.autograd.grad(ys, leaves[i], forms[i].dys, allow_unused=True)
            return ys + tuple(_NOTHING if t is None else t for t in found)

        return run

    def reference(self, dtype: torch.dtype) -> Tensors:
        """What a loop over the groups gives on the first set in ``dtype``; the oracle in
        float64."""
        given = self.stacks[0]
        value = activation_of(self.case.option("activation")).value
        found: list[list[Tensor]] = [[] for _ in self.names]
        with self.mode():
            for g, dy in enumerate(given.dys):
                own = [t.detach().to(dtype) for t in group(given, g)]
                own = [t.requires_grad_(self.case.needs_grad) for t in own]
                y = value(F.linear(*own))
                grads = torch.autograd.grad(y, own, dy.to(dtype)) if self.case.needs_grad else ()
                for kind, t in zip(found, (y, *grads), strict=True):
                    kind.append(t.detach().flatten())
        return tuple(torch.cat(kind) for kind in found)

    def cost(self) -> Cost:
        """Each tensor of a group that owns rows moved once; with gradients, read or written once
        more for its own."""
        given, passes = self.stacks[0], 2 if self.case.needs_grad else 1
        pairs = zip(given.xs, given.weights, strict=True)
        products = sum(2.0 * x.shape[0] * w.numel() for x, w in pairs)
        return Cost((3 if self.case.needs_grad else 1) * products, float(passes * given.bytes))

    def shapes(self) -> dict[str, Any]:
        """Shapes of the tensors of one set: of each group's where there is no whole."""
        given = self.stacks[0]
        kinds: tuple[Any, ...] = given.whole or (given.xs, given.weights, given.dys)
        return {
            name: list(kind.shape) if isinstance(kind, Tensor) else [list(t.shape) for t in kind]
            for name, kind in zip(("x", "weight", "dy"), kinds, strict=False)
        }

    def strides(self) -> dict[str, list[int]]:
        """Strides of the whole's; those of groups are dense."""
        kinds = self.stacks[0].whole
        named = zip(("x", "weight", "dy"), kinds, strict=False)
        return {name: list(t.stride()) for name, t in named}


_NOTHING = torch.empty(0)


def by_layer(case: Case, count: int) -> Forward:
    """``count`` layers one by one, of all x, all weights and, if there are any, all biases."""
    value = activation_of(case.option("activation")).value

    def run(*given: Tensor) -> Tensors:
        groups = zip(*(given[i : i + count] for i in range(0, len(given), count)), strict=True)
        return tuple(value(F.linear(*own)) for own in groups)

    return run


def by_bmm(case: Case) -> Forward:
    """Padded groups, (G, M, K) and (G, N, K), as one batch of products."""
    value = activation_of(case.option("activation")).value

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensors:
        turned = weight.transpose(1, 2)
        if bias is None:
            return (value(torch.bmm(x, turned)),)
        return (value(torch.baddbmm(bias[:, None], x, turned)),)

    return run


def group(given: Lists, g: int) -> list[Tensor]:
    """x, weight and bias, if there is one, of a group."""
    kinds = (given.xs, given.weights, given.biases)
    return [kind[g] for kind in kinds if kind]


def silence(case: Case, given: Lists) -> None:
    """Zero dy in place where rounding decides the side of a kink."""
    if not case.needs_grad or case.option("activation") not in KINKED:
        return
    for g, dy in enumerate(given.dys):
        own = group(given, g)
        exact, rounded = F.linear(*(t.double() for t in own)), F.linear(*own)
        if dy.numel():
            dy.copy_(silent_at_kinks(dy, exact, rounded))


def one_behind_the_other(work: ListsWork, results: Tensors, outputs: int) -> Tensors:
    """Results of a form by lists, ``outputs`` of each kind, as they are judged: what is empty in
    place of a weight's or bias's gradient counts as zeros."""
    given = work.stacks[0]
    kinds = [results[i : i + outputs] for i in range(0, len(results), outputs)]
    wanted = (given.dys, given.xs, given.weights, given.biases)
    return tuple(
        torch.cat(
            [
                (t if t.numel() else torch.zeros_like(like)).flatten()
                for t, like in zip(kind, likes, strict=True)
            ]
        )
        for kind, likes in zip(kinds, wanted, strict=False)
    )


def flat(_: ListsWork, results: Tensors) -> Tensors:
    """Results of which each holds all groups in order."""
    return tuple(t.flatten() for t in results)


def contender(
    name: str,
    lay: Callable[[Lists], Form],
    forward: Callable[[ListsWork], Forward],
    gathered: Callable[[ListsWork, Tensors], Tensors],
    reason_not: Callable[[Case], str | None] = lambda _: None,
    *,
    compiled: bool = False,
    precompile: bool = False,
) -> Peer:
    """A contender by its form; ``forward`` is made for the work, ``gathered`` for judging."""

    def build(work: ListsWork) -> Unit:
        run = forward(work)
        if compiled:
            run = torch.compile(run, dynamic=False, fullgraph=True)
        return work.unit(lay, run)

    return Peer(name, build, reason_not, gathered=gathered, precompile=compiled or precompile)
