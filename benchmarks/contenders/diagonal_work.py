"""The work of experiment ``pseudo-linear``: tensors, a unit of work, oracle, least cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.harness.case import Case
from benchmarks.harness.work import AnyWork, Unit, drawing, rotated
from fastlinear.core.compare import KINKED
from fastlinear.core.cost import Cost
from fastlinear.core.problem import Problem
from fastlinear.families.diagonal import backends, reference


@dataclass(frozen=True)
class Diagonal:
    """The tensors of one input set: x, dy and residual (M, K), weight and bias (K,)."""

    index: int
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    residual: Tensor | None = None

    @property
    def differentiated(self) -> dict[str, Tensor]:
        """The tensors whose gradients are taken, by name."""
        named = {"x": self.x, "weight": self.weight, "bias": self.bias, "residual": self.residual}
        return {name: t for name, t in named.items() if t is not None}

    def to(self, dtype: torch.dtype) -> Diagonal:
        """Copies of their own in ``dtype``, with the same wish for gradients."""

        def copy(t: Tensor) -> Tensor:
            return t.detach().to(dtype, copy=True).requires_grad_(t.requires_grad)

        bias = None if self.bias is None else copy(self.bias)
        residual = None if self.residual is None else copy(self.residual)
        x, weight, dy = map(copy, (self.x, self.weight, self.dy))
        return Diagonal(self.index, x, weight, bias, dy, residual)


Forward = Callable[[Diagonal], Tensor]


@dataclass(frozen=True)
class DiagonalWork(AnyWork):
    """The tensors of a case and how a unit of work runs over them."""

    case: Case
    stacks: tuple[Diagonal, ...]
    cold: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors a unit returns, in order."""
        grads = self.stacks[0].differentiated if self.case.needs_grad else ()
        return ("output", *(f"grad.{name}" for name in grads))

    def unit(self, forward: Forward) -> Unit:
        """Drive a contender's forward in the case's direction."""

        def run(i: int) -> tuple[Tensor, ...]:
            stack = self.stacks[i]
            y = forward(stack)
            if not self.case.needs_grad:
                return (y,)
            return (y, *torch.autograd.grad(y, tuple(stack.differentiated.values()), stack.dy))

        return run

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What plain PyTorch gives on the first set in ``dtype``; the oracle in float64."""
        work = replace(self, stacks=(self.stacks[0].to(dtype),))
        with work.mode():
            return tuple(t.detach() for t in work.unit(eager(self.case))(0))

    def cost(self) -> Cost:
        """Least bytes of the diagonal layer."""
        problem = problem_of(self.case)
        return backends.cost(problem.with_piece("step") if self.case.needs_grad else problem)

    def outer(self) -> dict[str, Tensor]:
        """The tensors of one set by name."""
        stack = self.stacks[0]
        return {**stack.differentiated, "dy": stack.dy}


def make_work(case: Case, device: torch.device) -> DiagonalWork:
    """Draw the tensors of a case."""
    passes = 2 if case.needs_grad else 1
    return DiagonalWork(case, *rotated(case, device, _draw, lambda s: passes * s.x.nbytes))


def _draw(case: Case, device: torch.device, index: int) -> Diagonal:
    m, k = case.dim("M"), case.dim("K")
    draw = drawing(case, device, index)
    x, weight, bias = draw(m, k), draw(k), draw(k)
    if index == 0 and case.needs_grad and case.option("activation") in KINKED:  # what is judged
        x = backends.clear_of_kink(x, weight, bias, lambda: draw(m, k))
    grad = case.needs_grad
    dy = (draw(m, k) if grad else x).detach()
    weight, bias = nn.Parameter(weight, requires_grad=grad), nn.Parameter(bias, requires_grad=grad)
    x = x.detach().requires_grad_(grad)
    if case.option("residual") != "yes":
        return Diagonal(index, x, weight, bias, dy)
    return Diagonal(index, x, weight, None, dy, draw(m, k).requires_grad_(grad))


def problem_of(case: Case) -> Problem:
    """The forward Problem that dispatch sees."""
    return backends.problem(
        "forward",
        case.dim("M"),
        case.dim("K"),
        dtype=case.dtype,
        device=case.device,
        activation=case.option("activation"),
        bias=case.option("bias") == "yes",
        residual=case.option("residual") == "yes",
        needs_grad=case.needs_grad,
    )


def eager(case: Case) -> Forward:
    """What plain PyTorch computes: a product, a sum, the activation, the residual."""
    name = case.option("activation")
    return lambda s: reference.by_torch(s.x, s.weight, s.bias, name, s.residual)
