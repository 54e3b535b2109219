"""The autograd formula of gated_mlp; the backends of its two pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """

    activation: str
    order: str
    save_pre: bool
    run: Callable[..., Any]
    backward: Callable[..., Any]


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
        weights = Weights(gate_weight, up_weight, down_weight)
        biases = Biases(gate_bias, up_bias, down_bias)
        reads_pre = any(ctx.needs_input_grad[:6])  # the down bias alone does not
        save = formula.save_pre and reads_pre
        rows = as_rows(x)
        y, *pre = formula.run(rows, weights, biases, formula.activation, formula.order, save)
        ctx.save_for_backward(x, *weights, *biases, *pre)
        ctx.formula = formula
        return y.view(*x.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Seven gradients and None; differentiable by torch's own ops where a graph is asked."""
        formula = ctx.formula
        x, *rest = ctx.saved_tensors
        weights, biases, pre = Weights(*rest[:3]), Biases(*rest[3:6]), tuple(rest[6:])
        needs: Needs = tuple(ctx.needs_input_grad[:7])  # type: ignore[assignment]
        names = formula.activation, formula.order
        if torch.is_grad_enabled():  # create_graph: the gradients must be differentiable
            return (*differentiable_backward(dy, x, weights, biases, *names, needs), None)
        kept = None if pre[0] is None else pre
        grads = run_backward(dy, kept, x, weights, biases, *names, needs, formula.backward)
        return (*grads, None)


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
) -> Gradients:
    """Call a backward backend for x (..., K) and dy of y's shape; dx has x's shape."""
    dy = dy.resolve_neg().reshape(x.shape[:-1].numel(), out_features(weights))
    if not dy.is_contiguous():  # an expanded gradient, as sum() makes
        dy = dy.contiguous()
    dx, *others = run(dy, pre, as_rows(x), weights, biases, activation, order, needs)
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
