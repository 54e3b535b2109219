"""The autograd formula of diagonal_linear; the backends of its two pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.core import calls
from fastlinear.families.diagonal import reference
from fastlinear.families.diagonal.reference import Gradients, Needs
from fastlinear.fastpath import autograd_node

Rest = tuple[Tensor | None, Tensor | None]
"""(bias, residual)"""
_DX, _DW = 1, 2  # gradients as bits


@dataclass(frozen=True, slots=True)
class Formula:
    """What one plan's autograd needs besides its tensors.

    Attributes:
        activation: its name.
        run: the forward's backend.
        backward: the backward's backend.
    """

    node: ClassVar[str] = "DiagonalLinearBackward"
    kept: ClassVar[tuple[int, ...]] = (autograd_node.NOTHING,)
    kept_readers: ClassVar[None] = None
    activation: str
    run: Callable[..., Any]
    backward: Callable[..., Any]

    def forward(self, x: Tensor, weight: Tensor, rest: Rest) -> tuple[Tensor, None]:
        """(y (..., K), nothing kept besides the inputs); no gradients."""
        bias, residual = rest
        if x.dim() == 2:
            return self.run(x, weight, bias, self.activation, residual, None), None
        k = x.shape[-1]
        rows = None if residual is None else residual.reshape(-1, k)
        y = self.run(x.reshape(-1, k), weight, bias, self.activation, rows, None)
        return calls.as_result(y, x.shape), None

    def gradients(
        self,
        dy: Tensor,
        _hidden: Any,
        _shape: tuple[int, ...],
        tensors: tuple[Tensor | None, ...],
        _kept: Any,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """(dx, dw, db, dr); by torch's own, differentiable ops where a graph is asked for.

        Args:
            dy: the gradient of y (..., K).
            tensors: x, weight, bias and residual, each None where no wanted gradient reads it.
            needs: which of the results are wanted.
        """
        x, weight, bias = tensors[:3]
        own_ops = torch.is_grad_enabled() or calls.batched(dy)
        run = differentiable if own_ops else run_backward
        wanted = needs[0], needs[1], needs[2]
        grads = run(dy, x, weight, bias, self.activation, wanted, self.backward)
        return (*grads, dy if needs[3] else None)

    @property
    def readers(self) -> tuple[int, int, int, int]:
        """For each tensor of a call the gradients that read it, as bits: dx 1, dw 2, db 4."""
        every = 7 if self.activation != "none" else 0
        return _DW | every, _DX | every, every, 0


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
        y, _ = formula.forward(x, weight, (bias, residual))
        needs = sum(bit for bit, need in zip((1, 2, 4), ctx.needs_input_grad, strict=False) if need)
        given = zip((x, weight, bias), formula.readers, strict=False)
        ctx.save_for_backward(*(t if needs & bits else None for t, bits in given))
        ctx.formula = formula
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        """(dx, dw, db, dr, None)."""
        if dy is None:
            return None, None, None, None, None
        tensors = (*ctx.saved_tensors, None)
        needs = calls.wanted(ctx)[:4]
        return (*ctx.formula.gradients(dy, None, dy.shape, tensors, None, needs), None)


# torch.autograd.Function's own apply without its Python, which looks for transforms only.
_apply = super(torch.autograd.Function, DiagonalLinear).apply  # type: ignore[misc]


def applied(formula: Formula) -> Callable[..., Tensor]:
    """``DiagonalLinear`` with this formula, for plain tensors outside torch.func's transforms."""

    def plan(x: Tensor, weight: Tensor, rest: Rest) -> Tensor:
        bias, residual = rest
        bias = None if bias is None else bias.contiguous()
        return _apply(x, weight.contiguous(), bias, residual, formula)  # type: ignore[no-any-return]

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
    shape = dy.shape[:-1].numel(), dy.shape[-1]  # -1 is ambiguous where there are no features
    rows = None if x is None else x.reshape(shape)
    dx, dw, db = run(dy.view(shape), rows, weight, bias, activation, needs)
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
    if reference.widens(dy):
        x, weight, bias = (None if t is None else t.float() for t in (x, weight, bias))
        grads = differentiable(dy.float(), x, weight, bias, activation, needs, _)
        return reference.rounded(grads, dy.dtype)
    dims = tuple(range(dy.dim() - 1))
    dpre = dy
    if activation != "none":
        assert x is not None
        assert weight is not None
        # a node of its own, at which this gradient stops
        with torch.enable_grad():
            pre = x * weight if bias is None else x * weight + bias
            pre = pre.view_as(pre) if pre.requires_grad else pre.requires_grad_()
            y = reference.activated(pre, activation)
            (dpre,) = torch.autograd.grad(y, pre, dy, create_graph=True)
    dx = dpre * weight if needs[0] and weight is not None else None
    dw = _summed(dpre * x, dims) if needs[1] and x is not None else None
    return dx, dw, _summed(dpre, dims) if needs[2] else None


def _summed(t: Tensor, dims: tuple[int, ...]) -> Tensor:
    return t.sum(dims) if dims else t  # sum() of no dims would be of all
