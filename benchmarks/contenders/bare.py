"""The floor of a training step of linear layers: its products and the update, nothing else.

No contender: there is no activation in it, no autograd, and its gradients go to memory that is
there from the step before. What a step takes beyond it is what any rewriting could gain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness.case import Case
from benchmarks.harness.work import LEARNING_RATE, Stack, Unit, Work


def reason_not(case: Case) -> str | None:
    """Why the floor is not measured in a case, or None."""
    if case.device != "cpu" or case.direction != "step":
        return "the floor of a step, measured on a CPU"
    return "the floor is measured with biases" if case.option("bias") == "no" else None


def step(work: Work) -> Unit:
    """Products forward and backward by PyTorch, then SGD, all in place."""
    (stack,) = work.stacks
    grads = [torch.empty_like(p) for p in stack.parameters]
    rows = [torch.empty_like(stack.dy) for _ in stack.weights]
    back = torch.empty_like(stack.dy), torch.empty_like(stack.dy)

    def run(_: int) -> tuple[Tensor, ...]:
        with torch.no_grad():
            _products(stack, rows, back, grads)
            torch._foreach_add_(list(stack.parameters), grads, alpha=-LEARNING_RATE)
        return (rows[-1], *grads)

    return run


def reference(work: Work, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What a step returns on the first set in ``dtype``."""
    stack = work.stacks[0].to(dtype)
    with torch.no_grad():
        rows = [torch.empty_like(stack.dy) for _ in stack.weights]
        back = torch.empty_like(stack.dy), torch.empty_like(stack.dy)
        grads = [torch.empty_like(p) for p in stack.parameters]
        _products(stack, rows, back, grads)
    return (rows[-1], *grads)


def _products(
    stack: Stack, rows: list[Tensor], back: tuple[Tensor, Tensor], grads: list[Tensor]
) -> None:
    """The gradient of the mean squared error of the chain without its activations."""
    layers = len(stack.weights)
    inputs = [stack.x, *rows[:-1]]
    for x, y, weight, bias in zip(inputs, rows, stack.weights, stack.biases, strict=True):
        assert bias is not None
        torch.addmm(bias, x, weight.t(), out=y)
    dy, other = back
    torch.sub(rows[-1], stack.dy, out=dy).mul_(2.0 / dy.numel())
    for i in reversed(range(layers)):
        torch.mm(dy.t(), inputs[i], out=grads[i])
        torch.sum(dy, 0, out=grads[layers + i])
        if i:
            torch.mm(dy, stack.weights[i], out=other)
            dy, other = other, dy
