"""The autograd formula of linear_act; the backends of its pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.dispatch.select import Choice
from fastlinear.ops.linear_act import reference
from fastlinear.ops.linear_act.backends import BACKWARD_PIECES


def backward_of(chosen: tuple[Choice, ...]) -> Callable[..., Any]:
    """One callable for the whole backward, out of the backends chosen for its pieces."""
    by_piece = {c.problem.piece: c.backend for c in chosen}
    return backward_from(*(by_piece[piece].load() for piece in BACKWARD_PIECES))


def backward_from(
    grad_pre: Callable[..., Any], grad_input: Callable[..., Any], grad_weight: Callable[..., Any]
) -> Callable[..., Any]:
    """(dy, saved, x, weight, activation, needs) → (dx, dW, db), each None where not needed."""

    def pieces(
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        activation: str,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dpre, db = grad_pre(dy, saved, activation, needs[2])
        dx = grad_input(dpre, weight) if needs[0] else None
        dw = grad_weight(dpre, x) if needs[1] else None
        return dx, dw, db

    return pieces


@dataclass(frozen=True, slots=True)
class Formula:
    """What one plan's autograd needs besides its tensors.

    Attributes:
        activation: its name.
        saved: what the backward reads: ``"none"``, ``"output"`` or ``"pre"``.
        run: the forward's backend.
        backward: (dy, saved, x, weight, activation, needs) → (dx, dW, db).
    """

    activation: str
    saved: str
    run: Callable[..., Any]
    backward: Callable[..., Any]


class LinearAct(torch.autograd.Function):
    """The one autograd formula of the family; backends sit below it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, formula: Formula
    ) -> Tensor:
        """act(x Wᵀ + b), keeping what the formula's backward reads."""
        flat = x.dim() == 2
        x2 = x if flat else x.reshape(-1, x.shape[-1])
        kind = formula.saved
        y, pre = formula.run(x2, weight, bias, formula.activation, kind == "pre")
        if not flat:
            y = y.view(*x.shape[:-1], weight.shape[0])
        saved = pre if kind == "pre" else y if kind == "output" else None
        ctx.save_for_backward(x, weight, bias, saved)
        ctx.formula = formula
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(dx, dW, db, None); differentiable by torch's own ops where a graph is asked for."""
        x, weight, bias, saved = ctx.saved_tensors
        formula = ctx.formula
        needs = tuple(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # create_graph: the gradients must be differentiable
            grads = _differentiable_backward(dy, x, weight, bias, formula.activation, needs)
        else:
            grads = run_backward(dy, saved, x, weight, formula.activation, needs, formula.backward)
        return (*grads, None)


def run_backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: tuple[bool, ...],
    run: Callable[..., Any],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    n, k = weight.shape
    m = x.shape[:-1].numel()
    dy2 = dy.resolve_neg().reshape(m, n)
    if not dy2.is_contiguous():  # an expanded gradient, as sum() makes
        dy2 = dy2.contiguous()
    saved2 = None if saved is None else saved.reshape(m, n)
    dx, dw, db = run(dy2, saved2, x.reshape(m, k), weight, activation, needs)
    return (None if dx is None else dx.view(x.shape)), dw, db


def _differentiable_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    # Views make each argument a node of its own: x may depend on weight, or be it, and each
    # gradient must stop at its argument.
    with torch.enable_grad():
        x, weight = x.view_as(x), weight.view_as(weight)
        bias = None if bias is None else bias.view_as(bias)
    inputs = (x, weight, bias)
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    with torch.enable_grad():
        y = reference.linear_act(x, weight, bias, activation)
        grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return tuple(
        next(grads) if need and t is not None else None
        for t, need in zip(inputs, needs, strict=True)
    )
