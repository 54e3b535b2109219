"""The work of a case: its tensors, one unit of work, the float64 oracle, its least cost.

Every contender gets the same tensors and the same driver; it supplies only the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.case import Case
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import KINKED, clear_of_kinks
from fastlinear.core.cost import Cost
from fastlinear.core.device import device_facts
from fastlinear.core.precision import FLOAT_DTYPES

LEARNING_RATE = 0.01
_MAX_SETS = 64
S = TypeVar("S")


@dataclass(frozen=True)
class Stack:
    """One input set of L linear layers with activations behind them.

    Attributes:
        index: its place among the rotated sets.
        x: input, (M, K).
        weights: L tensors, each (features out, features in).
        biases: L tensors (features out,), or None each.
        dy: gradient of the output (forward+backward) or target (step), (M, N).
        activation: the name of the activation behind every layer but the last.
        final: of that behind the last.
        skips: layers that take x again, before what the layer below gives.
    """

    index: int
    x: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    dy: Tensor
    activation: str
    final: str
    skips: tuple[int, ...] = ()

    @property
    def activations(self) -> tuple[str, ...]:
        """The activation of every layer."""
        return (*(self.activation,) * (len(self.weights) - 1), self.final)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """All weights, then all biases that exist."""
        return (*self.weights, *(b for b in self.biases if b is not None))

    def to(self, dtype: torch.dtype) -> Stack:
        """Copies of all tensors in another dtype, with the same ``requires_grad``."""

        def parameter(t: Tensor) -> Tensor:
            values = t.detach().to(dtype, copy=True)
            return torch.nn.Parameter(values, requires_grad=t.requires_grad)

        return replace(
            self,
            x=self.x.detach().to(dtype, copy=True).requires_grad_(self.x.requires_grad),
            weights=tuple(map(parameter, self.weights)),
            biases=tuple(None if b is None else parameter(b) for b in self.biases),
            dy=self.dy.to(dtype, copy=True),
        )


Forward = Callable[[Stack], Tensor]
Unit = Callable[[int], tuple[Tensor, ...]]
"""One unit of work on the set of that index; returns the tensors named by ``Work.names``."""


class AnyWork:
    """What the works of all families share.

    Attributes:
        case: what is measured.
    """

    case: Case

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors a unit returns, in order."""
        return ("output",)

    def mode(self) -> AbstractContextManager[Any]:
        """The gradient mode of every call."""
        return torch.enable_grad() if self.case.needs_grad else torch.no_grad()

    def private(self) -> Self:
        """The same work where no unit changes its parameters, else one on copies of its own."""
        return self

    def outer(self) -> Mapping[str, Tensor]:
        """The tensors of one set whose shapes and strides are published, by name."""
        raise NotImplementedError

    def shapes(self) -> dict[str, Any]:
        """Shapes of the tensors of one set."""
        return {name: list(t.shape) for name, t in self.outer().items()}

    def strides(self) -> dict[str, list[int]]:
        """Strides of the tensors of one set."""
        return {name: list(t.stride()) for name, t in self.outer().items()}


@dataclass(frozen=True)
class Work(AnyWork):
    """The tensors of a case and how a unit of work runs over them."""

    case: Case
    stacks: tuple[Stack, ...]
    cold: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors a unit returns, in order."""
        if not self.case.needs_grad:
            return ("output",)
        stack = self.stacks[0]
        grads = [f"grad.weight.{i}" for i in range(len(stack.weights))]
        grads += [f"grad.bias.{i}" for i, b in enumerate(stack.biases) if b is not None]
        if self.case.direction == "forward+backward":
            grads.insert(0, "grad.x")
        return ("output", *grads)

    def unit(self, forward: Forward) -> Unit:
        """Drive a contender's forward in the case's direction."""
        if self.case.direction == "forward":
            return lambda i: (forward(self.stacks[i]),)
        if self.case.direction == "forward+backward":
            return self._gradients(forward)
        return self._step(forward)

    def _gradients(self, forward: Forward) -> Unit:
        def run(i: int) -> tuple[Tensor, ...]:
            stack = self.stacks[i]
            y = forward(stack)
            return (y, *torch.autograd.grad(y, (stack.x, *stack.parameters), stack.dy))

        return run

    def _step(self, forward: Forward) -> Unit:
        (stack,) = self.stacks
        parameters = list(stack.parameters)
        optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)

        def run(_: int) -> tuple[Tensor, ...]:
            optimizer.zero_grad(set_to_none=True)
            y = forward(stack)
            F.mse_loss(y, stack.dy).backward()
            optimizer.step()
            return (y, *(p.grad for p in parameters if p.grad is not None))

        return run

    def private(self) -> Self:
        """The same work on copies of its own: a training step changes its parameters."""
        if self.case.direction != "step":
            return self
        return replace(self, stacks=tuple(s.to(s.x.dtype) for s in self.stacks))

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What plain PyTorch gives on the first set in ``dtype``; the oracle in float64."""
        work = replace(self, stacks=(self.stacks[0].to(dtype),))
        with work.mode():
            results = work.unit(plain)(0)
        return tuple(t.detach() for t in results)

    def cost(self) -> Cost:
        """Least flops and bytes: each outer tensor moved once, nothing kept in between."""
        stack = self.stacks[0]
        m = stack.x.shape[0]
        products = sum(2.0 * m * w.numel() for w in stack.weights)
        size = stack.x.element_size()
        outer = stack.x.numel() + stack.dy.numel() + sum(p.numel() for p in stack.parameters)
        if not self.case.needs_grad:
            return Cost(products, size * outer)
        if self.case.direction == "forward+backward":
            # read x, parameters and dy; write y and one gradient of each input
            return Cost(3 * products, 2.0 * size * outer)
        # a step reads and writes the parameters and needs no gradient of x
        first = 2.0 * m * stack.weights[0].numel()
        return Cost(3 * products - first, size * (2.0 * outer - stack.x.numel()))

    def outer(self) -> dict[str, Tensor]:
        """x, the first weight and dy."""
        stack = self.stacks[0]
        return {"x": stack.x, "weight": stack.weights[0], "dy": stack.dy}


def plain(stack: Stack) -> Tensor:
    """The stack by ``F.linear`` and the activation, layer by layer; (M, K) → (M, N)."""
    return chain(stack.x, stack.weights, stack.biases, stack.activations, stack.skips)


def chain(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    activations: tuple[str, ...],
    skips: tuple[int, ...],
) -> Tensor:
    """The same of what a stack holds."""
    y = x
    for i, (weight, bias, name) in enumerate(zip(weights, biases, activations, strict=True)):
        entering = torch.cat((x, y), -1) if i in skips else y
        y = activation_of(name).value(F.linear(entering, weight, bias))
    return y


def widths_of(case: Case) -> tuple[int, ...]:
    """Features in, then features out of every layer: of the option ``sizes``, or all the same but
    for the first."""
    if case.option("sizes"):
        return tuple(map(int, case.option("sizes").split("-")))
    k, n = (case.dim("H" if "H" in dict(case.dims) else name) for name in ("K", "N"))
    return (k, *(n,) * case.dim("L"))


def skips_of(case: Case) -> tuple[int, ...]:
    """Layers that take x again."""
    return tuple(map(int, case.option("skips").split()))


def final_of(case: Case) -> str:
    """The activation behind the last layer."""
    return case.option("final") or case.option("activation")


def make_work(case: Case, device: torch.device) -> Work:
    """Draw the tensors of a case of linear layers.

    On CUDA so many sets are made that rotating over them exceeds the L2 cache twice (at most 64).
    On a CPU, and where the option ``caches`` is ``warm``, there is one set and the caches are warm,
    as they are for a model run over and over.
    """
    warm = case.direction == "step" or case.option("caches") == "warm"
    stacks, cold = rotated(
        case, device, _make_stack, lambda s: sum(t.nbytes for t in (s.x, *s.parameters, s.dy)), warm
    )
    return Work(case, stacks, cold)


def rotated(
    case: Case,
    device: torch.device,
    draw: Callable[[Case, torch.device, int], S],
    size: Callable[[S], int],
    warm: bool = False,
) -> tuple[tuple[S, ...], bool]:
    """The input sets of a case, and whether each call finds cold caches.

    On CUDA as many sets, at most 64, as exceed the L2 cache twice; elsewhere, and where caches are
    to be warm, one.

    Args:
        draw: makes the set of a number.
        size: bytes of a set that a call touches.
    """
    first = draw(case, device, 0)
    if device.type != "cuda" or warm:
        return (first,), False
    wanted = math.ceil(2 * device_facts(device).l2_bytes / size(first))
    sets = max(1, min(_MAX_SETS, wanted))
    return (first, *(draw(case, device, i) for i in range(1, sets))), wanted <= _MAX_SETS


def drawing(case: Case, device: torch.device, index: int) -> Callable[..., Tensor]:
    """What draws the tensors of the set of that number: of a shape, times ``scale``."""
    generator = torch.Generator(device=device).manual_seed(case.seed * 1000 + index)
    dtype = FLOAT_DTYPES[case.dtype]

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, generator=generator) * scale).to(dtype)

    return draw


def _make_stack(case: Case, device: torch.device, index: int) -> Stack:
    m, widths = case.dim("M"), widths_of(case)
    draw, grad = drawing(case, device, index), case.needs_grad

    def parameter(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.nn.Parameter(draw(*shape, scale=scale), requires_grad=grad)

    x = draw(m, widths[0])
    skips = skips_of(case)
    taken = (k + (widths[0] if i in skips else 0) for i, k in enumerate(widths[:-1]))
    weights = tuple(parameter(n, k, scale=k**-0.5) for k, n in zip(taken, widths[1:], strict=True))
    bias = case.option("bias") != "no"
    biases = tuple(parameter(n) if bias else None for n in widths[1:])
    if index == 0 and grad and case.option("activation") in KINKED:  # the set that is judged

        def pre_activations(rows: Tensor) -> Iterator[Tensor]:
            act = activation_of(case.option("activation")).value
            last, first = len(weights) - 1, rows
            for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
                rows = torch.cat((first, rows), -1) if i in skips else rows
                pre = F.linear(rows, w.to(rows.dtype), None if b is None else b.to(rows.dtype))
                if i < last or final_of(case) in KINKED:
                    yield pre
                rows = act(pre)

        x, _ = clear_of_kinks(x, pre_activations, lambda rows: draw(rows, widths[0]))
    x.requires_grad_(case.direction == "forward+backward")
    names = case.option("activation"), final_of(case)
    return Stack(index, x, weights, biases, draw(m, widths[-1]), *names, skips)
