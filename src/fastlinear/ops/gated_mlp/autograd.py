"""The autograd formula of gated_mlp; the backends of its two pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.ops.common import calls
from fastlinear.ops.gated_mlp import reference
from fastlinear.ops.gated_mlp.stacking import (
    Biases,
    Gradients,
    Needs,
    Pre,
    Weights,
    out_features,
)


@dataclass(frozen=True, slots=True)
class Formula:
    """What one plan's autograd needs besides its tensors.

    Attributes:
        activation: its name.
        order: how gate and up weights lie.
        save_pre: whether the forward keeps its pre-activations; else the backward forms them again.
        run: the forward's backend.
        backward: the backward's backend.
        forward_name, backward_name: theirs.
    """

    activation: str
    order: str
    save_pre: bool
    run: Callable[..., Any]
    backward: Callable[..., Any]
    forward_name: str
    backward_name: str

    def forward(
        self, x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """y, then the two pre-activations, or their stack and None; None twice where they are not
        kept. x is (..., K)."""
        held: Any = weights
        names = self.activation, self.order
        y, *pre = self.run(as_rows(x), Weights(*held), Biases(*biases), *names, self.save_pre)
        return (calls.as_result(y, (*x.shape[:-1], y.shape[-1])), *pre)

    def gradients(
        self,
        dy: Tensor,
        _: None,
        shape: tuple[int, ...],
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
        over: bool = False,
    ) -> Gradients:
        """Seven, differentiable where a graph is asked for.

        Args:
            dy: gradient of y, of its shape.
            tensors: x, three weights, three biases.
            kept: as ``forward`` gives it after y.
            needs: which gradients are wanted.
            over: whether the memory of ``kept`` may be written over.
        """
        given: Any = tensors
        wanted: Any = tuple(needs)
        x, weights, biases = given[0], Weights(*given[1:4]), Biases(*given[4:7])
        names = self.activation, self.order
        if torch.is_grad_enabled():  # create_graph: the gradients must be differentiable
            return differentiable_backward(dy, x, weights, biases, *names, wanted)
        pre: Any = None if kept[0] is None else kept
        return run_backward(dy, pre, x, weights, biases, *names, wanted, self.backward, over)


class GatedMLP(torch.autograd.Function):
    """The one autograd formula of the family; backends sit below it.

    Kept for the backward are x and the two pre-activations, or x alone; never what the gate lets
    through.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor | None,
        down_weight: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        formula: Formula,
    ) -> Tensor:
        """(act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu)) Wdᵀ + bd, x (..., K)."""
        weights = gate_weight, up_weight, down_weight
        biases = gate_bias, up_bias, down_bias
        # The same is kept whatever is wanted, as by the node in C++: a checkpoint counts on it.
        y, *pre = formula.forward(x, weights, biases)
        ctx.save_for_backward(x, *weights, *biases, *pre)
        ctx.formula = formula
        return y  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Seven gradients and None; differentiable by torch's own ops where a graph is asked."""
        saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[:7]
        return (*ctx.formula.gradients(dy, None, dy.shape, saved[:7], saved[7:], needs), None)


def as_rows(x: Tensor) -> Tensor:
    """(..., K) as (M, K); a copy where no view can be."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def run_backward(
    dy: Tensor,
    pre: Pre | None,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    needs: Needs,
    run: Callable[..., Any],
    over: bool = False,
) -> Gradients:
    """Call a backward backend for x (..., K) and dy of y's shape; dx has x's shape. ``over`` gives
    the memory of pre away."""
    dy = dy.resolve_neg().reshape(x.shape[:-1].numel(), out_features(weights))
    if not dy.is_contiguous():  # an expanded gradient, as sum() makes
        dy = dy.contiguous()
    dx, *others = run(dy, pre, as_rows(x), weights, biases, activation, order, needs, over)
    return (None if dx is None else dx.view(x.shape)), *others


def differentiable_backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    needs: Needs,
) -> Gradients:
    """The gradients by torch's own differentiable ops."""
    # Views make each argument a node of its own: x may depend on a weight, and each gradient must
    # stop at its argument.
    with torch.enable_grad():
        given = [None if t is None else t.view_as(t) for t in (x, *weights, *biases)]
        wanted = [t for t, need in zip(given, needs, strict=True) if need and t is not None]
        own = given[0]
        assert own is not None
        y = reference.gated_mlp(
            own,
            Weights(*given[1:4]),  # type: ignore[arg-type]
            Biases(*given[4:7]),
            activation,
            order,
        )
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return tuple(
        next(found) if need and t is not None else None
        for t, need in zip(given, needs, strict=True)
    )
