"""The autograd formula of diagonal_linear; the backends of its two pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.ops.diagonal_linear import reference
from fastlinear.ops.diagonal_linear.reference import Gradients, Needs


@dataclass(frozen=True, slots=True)
class Formula:
    """What one plan's autograd needs besides its tensors.

    Attributes:
        activation: its name.
        run: the forward's backend.
        backward: the backward's backend.
    """

    activation: str
    run: Callable[..., Any]
    backward: Callable[..., Any]


class DiagonalLinear(torch.autograd.Function):
    """The one autograd formula of the family; backends sit below it.

    Kept for the backward are the inputs only: the pre-activation is one multiply-add away from x,
    which dw reads anyhow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        formula: Formula,
    ) -> Tensor:
        """act(x ∘ w + b) + r, (..., K)."""
        if x.dim() == 2:
            y = formula.run(x, weight, bias, formula.activation, residual, None)
        else:
            k = x.shape[-1]
            rows = None if residual is None else residual.reshape(-1, k)
            y = formula.run(x.reshape(-1, k), weight, bias, formula.activation, rows, None)
            y = y.view(x.shape)
        needs = ctx.needs_input_grad
        acts = formula.activation != "none"
        ctx.save_for_backward(
            x if acts or needs[1] else None,
            weight if acts or needs[0] else None,
            bias if acts else None,
        )
        ctx.formula = formula
        ctx.set_materialize_grads(False)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        """(dx, dw, db, dr, None); by torch's own, differentiable ops where a graph is asked for."""
        if dy is None:
            return None, None, None, None, None
        formula = ctx.formula
        x, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = needs[0], needs[1], needs[2]
        run = differentiable if torch.is_grad_enabled() else run_backward
        grads = run(dy, x, weight, bias, formula.activation, wanted, formula.backward)
        return (*grads, dy if needs[3] else None, None)


# torch.autograd.Function's own apply without its Python, which looks for transforms only.
_apply = super(torch.autograd.Function, DiagonalLinear).apply  # type: ignore[misc]


def applied(formula: Formula) -> Callable[..., Tensor]:
    """``DiagonalLinear`` with this formula, for plain tensors outside torch.func's transforms."""

    def plan(x: Tensor, weight: Tensor, rest: tuple[Tensor | None, Tensor | None]) -> Tensor:
        return _apply(x, weight, rest[0], rest[1], formula)  # type: ignore[no-any-return]

    return plan


def run_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    needs: Needs,
    run: Callable[..., Any],
) -> Gradients:
    """``run`` on matrices: dy and x (..., K) → dx (..., K), dw (K,), db (K,)."""
    if not any(needs):  # the residual alone has a gradient
        return None, None, None
    if dy.is_neg():
        dy = dy.resolve_neg()
    if not dy.is_contiguous():  # an expanded gradient, as sum() makes
        dy = dy.contiguous()
    if dy.dim() == 2:
        found: Gradients = run(dy, x, weight, bias, activation, needs)
        return found
    k = dy.shape[-1]
    rows = None if x is None else x.reshape(-1, k)
    dx, dw, db = run(dy.view(-1, k), rows, weight, bias, activation, needs)
    return (None if dx is None else dx.view(dy.shape)), dw, db


def differentiable(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    needs: Needs,
    _: Callable[..., Any],
) -> Gradients:
    """The gradients by torch's own differentiable ops, on what ``DiagonalLinear`` keeps."""
    dims = tuple(range(dy.dim() - 1))
    dpre = dy
    if activation != "none":
        assert x is not None
        assert weight is not None
        # a node of its own, at which this gradient stops
        pre = x * weight if bias is None else x * weight + bias
        pre = pre.view_as(pre) if pre.requires_grad else pre.requires_grad_()
        y = reference.activated(pre, activation)
        (dpre,) = torch.autograd.grad(y, pre, dy, create_graph=True)
    dx = dpre * weight if needs[0] and weight is not None else None
    dw = _summed(dpre * x, dims) if needs[1] and x is not None else None
    return dx, dw, _summed(dpre, dims) if needs[2] else None


def _summed(t: Tensor, dims: tuple[int, ...]) -> Tensor:
    return t.sum(dims) if dims else t  # sum() of no dims would be of all
