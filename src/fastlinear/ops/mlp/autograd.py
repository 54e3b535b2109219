"""The autograd formula of mlp; the backends of its two pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.mlp import reference
from fastlinear.ops.mlp.reference import Biases, Needs, Weights

Grads = tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]


@dataclass(frozen=True, slots=True)
class Formula:
    """What one plan's autograd needs besides its tensors.

    Attributes:
        activation, final_activation: their names.
        layers: L.
        run: the forward's backend.
        backward: the backward's backend.
    """

    activation: str
    final_activation: str
    layers: int
    run: Callable[..., Any]
    backward: Callable[..., Any]


class Mlp(torch.autograd.Function):
    """The one autograd formula of the family; backends sit below it."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """The whole chain; ``parameters`` are the L weights, then the L biases."""
        layers = formula.layers
        weights, biases = parameters[:layers], parameters[layers:]
        flat = x.dim() == 2
        x2 = x if flat else x.reshape(-1, x.shape[-1])
        names = formula.activation, formula.final_activation
        y, saved = formula.run(x2, weights, biases, *names, True)
        if not flat:
            y = y.view(*x.shape[:-1], y.shape[-1])
        kind = activation_of(formula.final_activation).saved
        last = {"none": None, "output": y, "pre": saved[-1]}[kind]
        ctx.save_for_backward(x, *parameters, *saved[:-1], last)
        ctx.formula = formula
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(None, dx, dWs…, dbs…); differentiable by torch's own ops where a graph is asked for."""
        formula = ctx.formula
        layers = formula.layers
        x, *rest = ctx.saved_tensors
        weights, biases = tuple(rest[:layers]), tuple(rest[layers : 2 * layers])
        wanted = ctx.needs_input_grad[1:]
        needs = (wanted[0], wanted[1 : layers + 1], wanted[layers + 1 :])
        names = formula.activation, formula.final_activation
        if torch.is_grad_enabled():  # create_graph: the gradients must be differentiable
            grads = differentiable_backward(dy, x, weights, biases, *names, needs)
        else:
            saved = rest[2 * layers :]
            grads = run_backward(dy, x, weights, saved, *names, needs, formula.backward)
        return (None, grads[0], *grads[1], *grads[2])


def run_backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    saved: list[Tensor | None],
    activation: str,
    final_activation: str,
    needs: Needs,
    run: Callable[..., Any],
) -> Grads:
    """Call a backward backend; saved[-1] is None where the last derivative reads nothing."""
    m = x.shape[:-1].numel()
    dy2 = dy.resolve_neg().reshape(m, dy.shape[-1])
    if not dy2.is_contiguous():  # an expanded gradient, as sum() makes
        dy2 = dy2.contiguous()
    last = dy2 if saved[-1] is None else saved[-1].reshape(dy2.shape)
    x2 = x.reshape(m, x.shape[-1])
    dx, dws, dbs = run(dy2, x2, weights, (*saved[:-1], last), activation, final_activation, needs)
    return (None if dx is None else dx.view(x.shape)), dws, dbs


def differentiable_backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    needs: Needs,
) -> Grads:
    """The gradients by torch's own differentiable ops."""
    # Views make each argument a node of its own: x may depend on a weight, or two weights be one
    # tensor, and each gradient must stop at its argument.
    with torch.enable_grad():
        x = x.view_as(x)
        weights = tuple(w.view_as(w) for w in weights)
        biases = tuple(None if b is None else b.view_as(b) for b in biases)
        flags = (needs[0], *needs[1], *needs[2])
        inputs = (x, *weights, *biases)
        wanted = [t for t, need in zip(inputs, flags, strict=True) if need and t is not None]
        y = reference.mlp(x, weights, biases, activation, final_activation)
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    grads = [
        next(found) if need and t is not None else None
        for t, need in zip(inputs, flags, strict=True)
    ]
    layers = len(weights)
    return grads[0], tuple(grads[1 : layers + 1]), tuple(grads[layers + 1 :])
