"""What the contenders of ``gated-mlp`` work on: a case's tensors, laid out for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.case import Case
from benchmarks.harness.work import AnyWork, Unit, drawing, rotated
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import KINKED, clear_of_kinks
from fastlinear.core.cost import Cost
from fastlinear.families.gated.stacking import Biases, Weights, halves

Forward = Callable[[Tensor, Weights, Biases], Tensor]


@dataclass(frozen=True)
class Gated:
    """One input set: x (M, K), gate and up apart, biases or None, dy (M, N)."""

    x: Tensor
    weights: Weights
    biases: Biases
    dy: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All there are but dy."""
        return tuple(t for t in (self.x, *self.weights, *self.biases) if t is not None)

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(t.nbytes for t in (*self.tensors, self.dy))

    def to(self, dtype: torch.dtype) -> Gated:
        """The same numbers in another dtype."""

        def one(t: Any) -> Any:
            return None if t is None else t.detach().to(dtype)

        weights, biases = Weights(*map(one, self.weights)), Biases(*map(one, self.biases))
        return Gated(one(self.x), weights, biases, one(self.dy))


@dataclass(frozen=True)
class GatedWork(AnyWork):
    """The tensors of a case and how a unit of work runs over them."""

    case: Case
    stacks: tuple[Gated, ...]
    cold: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors a unit returns."""
        if not self.case.needs_grad:
            return ("output",)
        kinds = ("gate", "up", "down")
        given = self.stacks[0]
        held = [k for k, b in zip(kinds, given.biases, strict=True) if b is not None]
        weights = (f"grad.{k}_weight" for k in kinds)
        return ("output", "grad.x", *weights, *(f"grad.{k}_bias" for k in held))

    def unit(self, forward: Forward, order: str = "apart") -> Unit:
        """Drive a contender's forward on weights in its order; gradients of a stack are told apart
        as views."""
        grad = self.case.needs_grad
        sets = [(_laid(given, order, grad), given.dy) for given in self.stacks]
        if not grad:
            return lambda i: (forward(*sets[i][0]),)

        def run(i: int) -> tuple[Tensor, ...]:
            (x, weights, biases), dy = sets[i]
            given = [t for t in (x, *weights, *biases) if t is not None]
            y = forward(x, weights, biases)
            found = iter(torch.autograd.grad(y, given, dy))
            dx = next(found)
            dw, db = ([None if t is None else next(found) for t in ts] for ts in (weights, biases))
            for grads in (dw, db):
                if order != "apart" and grads[0] is not None:
                    grads[:2] = halves(grads[0], None, order, 0)
            return (y, dx, *(g for g in (*dw, *db) if g is not None))

        return run

    def without_biases(self) -> GatedWork:
        """The same tensors but for the biases, of which there are none."""
        none = Biases(None, None, None)
        return replace(self, stacks=tuple(replace(given, biases=none) for given in self.stacks))

    def reference(self, dtype: torch.dtype, forward: Forward | None = None) -> tuple[Tensor, ...]:
        """What PyTorch's layers give on the first set in ``dtype``; the oracle in float64."""
        work = replace(self, stacks=(self.stacks[0].to(dtype),))
        with work.mode():
            return tuple(t.detach() for t in work.unit(forward or eager(self.case))(0))

    def cost(self) -> Cost:
        """Each outer tensor moved once; with gradients, read or written once more for its own."""
        given, passes = self.stacks[0], 2 if self.case.needs_grad else 1
        numbers = sum(w.numel() for w in given.weights if w is not None)
        products = (3 if self.case.needs_grad else 1) * 2.0 * given.x.shape[0] * numbers
        return Cost(products, float(passes * given.bytes))

    def outer(self) -> dict[str, Tensor]:
        """The tensors of one set by name."""
        given = self.stacks[0]
        kinds = (f"{kind}_weight" for kind in ("gate", "up", "down"))
        held = {k: w for k, w in zip(kinds, given.weights, strict=True) if w is not None}
        return {"x": given.x, **held, "dy": given.dy}


def make_work(case: Case, device: torch.device) -> GatedWork:
    """Draw the tensors of a case."""
    return GatedWork(case, *rotated(case, device, _draw, lambda given: given.bytes))


def _draw(case: Case, device: torch.device, index: int) -> Gated:
    m, k, h, n = (case.dim(name) for name in ("M", "K", "H", "N"))
    draw, bias = drawing(case, device, index), case.option("bias") == "yes"
    weights = Weights(*(draw(o, i, scale=i**-0.5) for o, i in ((h, k), (h, k), (n, h))))
    biases = Biases(*(draw(size) if bias else None for size in (h, h, n)))
    x = draw(m, k)
    if index == 0 and case.needs_grad and case.option("activation") in KINKED:

        def gates(rows: Tensor) -> tuple[Tensor]:
            b = None if biases.gate is None else biases.gate.to(rows.dtype)
            return (F.linear(rows, weights.gate.to(rows.dtype), b),)

        x, _ = clear_of_kinks(x, gates, lambda rows: draw(rows, k))
    return Gated(x, weights, biases, draw(m, n))


def _laid(given: Gated, order: str, grad: bool) -> tuple[Tensor, Weights, Biases]:
    """The tensors of a set as leaves, gate and up in an order."""

    def leaf(t: Tensor | None) -> Any:
        return None if t is None else t.detach().requires_grad_(grad)

    def stacked(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        if one is None or other is None:
            return None
        both = torch.stack([one, other], 1) if order == "interleaved" else torch.stack([one, other])
        return both.flatten(0, 1)

    w, b = given.weights, given.biases
    if order != "apart":
        assert order in ("gate_up", "interleaved")
        w = Weights(stacked(w.gate, w.up), None, w.down)  # type: ignore[arg-type]
        b = Biases(stacked(b.gate, b.up), None, b.down)
    return leaf(given.x), Weights(*map(leaf, w)), Biases(*map(leaf, b))


def eager(case: Case) -> Forward:
    """What transformers runs: layers of their own for gate and up."""
    value = activation_of(case.option("activation")).value

    def forward(x: Tensor, w: Weights, b: Biases) -> Tensor:
        assert w.up is not None
        assert w.down is not None
        h = value(F.linear(x, w.gate, b.gate)) * F.linear(x, w.up, b.up)
        return F.linear(h, w.down, b.down)

    return forward
