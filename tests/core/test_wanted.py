"""Which gradients a backward is asked for: not those that nobody reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlinear.core.calls import wanted


class Watched(torch.autograd.Function):
    """A product that tells what it was asked for."""

    seen: tuple[bool, ...] = ()

    @staticmethod
    def forward(ctx: Any, scale: float, x: Tensor, none: None, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scale * (x @ weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        Watched.seen = wanted(ctx)
        x, weight = ctx.saved_tensors
        return None, dy @ weight.t(), None, x.t() @ dy


def asked(x: Tensor, weight: Tensor, *inputs: Tensor, create_graph: bool = False) -> Any:
    torch.autograd.grad(
        Watched.apply(1.0, x, None, weight).sum(), inputs, create_graph=create_graph
    )
    return Watched.seen


def test_of_leaves_and_of_results() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    assert asked(x, weight, x) == (False, True, False, False)
    assert asked(x, weight, weight) == (False, False, False, True)
    assert asked(x, weight, x, weight, create_graph=True) == (False, True, False, True)
    made = x * 2
    assert asked(made, weight, made) == (False, True, False, False)
    assert asked(made, weight, weight) == (False, False, False, True)
    assert asked(made, weight * 2, x) == (False, True, False, False)
    assert asked(x.detach(), weight, weight) == (False, False, False, True)
    assert asked(weight.t(), weight, weight) == (False, True, False, True)


def test_of_a_plain_backward_and_outside_of_one() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    y = Watched.apply(1.0, x, None, weight)
    y.sum().backward(inputs=[weight], retain_graph=True)
    assert Watched.seen == (False, False, False, True)
    y.sum().backward()
    assert Watched.seen == (False, True, False, True)

    class Called:
        needs_input_grad = (True, False)
        next_functions = ((y.grad_fn, 0),)

    assert wanted(Called()) == (True, False)
