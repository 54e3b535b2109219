"""The autograd formula of linear_act; the backends of its pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.dispatch.select import Choice
from fastlinear.families.linear import reference
from fastlinear.families.linear.problem import BACKWARD_PIECES, WHOLE_BACKWARD
from fastlinear.fastpath import autograd_node
from fastlinear.op import differentiable

Needs = tuple[bool, bool, bool]
_DX, _DW = 1, 2  # gradients as bits
_KEPT = {"none": (), "output": (autograd_node.OUTPUT,), "pre": (autograd_node.HIDDEN,)}
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Backward = Callable[[Tensor, Tensor | None, Tensor, Tensor, str, Needs], Gradients]
"""(dy, saved, x, weight, activation, needs) → (dx, dW, db), each None where not needed."""


def backward_of(chosen: tuple[Choice, ...]) -> Backward:
    """One callable for the whole backward: its own backend where one was chosen, else out of the
    backends chosen for its pieces."""
    by_piece = {c.problem.piece: c for c in chosen}
    whole = by_piece.get(WHOLE_BACKWARD)
    if whole is not None:
        return whole.load()
    return backward_from(*(by_piece[piece].load() for piece in BACKWARD_PIECES))


def backward_from(
    grad_pre: Callable[..., Any], grad_input: Callable[..., Any], grad_weight: Callable[..., Any]
) -> Backward:
    """The whole backward, one piece after the other."""

    def pieces(
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        activation: str,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if activation == "none":
            # dpre is dy: its sum reads best what the products have left in the caches.
            dx = grad_input(dy, weight) if needs[0] else None
            dw = grad_weight(dy, x) if needs[1] else None
            return dx, dw, grad_pre(dy, saved, activation, needs[2])[1]
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
        run: the forward's backend: (x (M, K), weight, bias, activation, save_pre) → (y, pre).
        backward: (dy, saved, x, weight, activation, needs) → (dx, dW, db).
    """

    node: ClassVar[str] = "LinearActBackward"
    readers: ClassVar[tuple[int, ...]] = (_DW, _DX, 0)
    kept_readers: ClassVar[None] = None
    activation: str
    saved: str
    run: Callable[..., Any]
    backward: Callable[..., Any]

    @property
    def kept(self) -> tuple[int, ...]:
        """How ``saved`` is kept."""
        return _KEPT[self.saved]

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(y (..., N), the pre-activation (M, N) where the backward reads it); no gradients."""
        x2 = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        save_pre = self.saved == "pre"
        y, pre = self.run(x2, weight, bias, self.activation, save_pre)
        y = calls.as_result(y, (*x.shape[:-1], weight.shape[0]))
        return y, pre if save_pre else None

    def gradients(
        self,
        dy: Tensor | None,
        dpre: Tensor | None,
        shape: tuple[int, ...],
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
    ) -> Gradients:
        """(dx, dW, db); by differentiable ops where a graph is asked for.

        Args:
            dy, dpre: gradients of y (..., N) and of the hidden pre-activation (M, N), which only
                second derivatives have; one of them is given.
            shape: y's.
            tensors: x, weight and bias, each None where no wanted gradient reads it.
            kept: what the activation's derivative reads, if any.
            needs: which of the results are wanted.
        """
        run = self.backward
        if dpre is not None:
            run = _plus(dpre)
            dy = dpre.new_zeros(()).expand(shape) if dy is None else dy
        elif torch.is_grad_enabled() or (dy is not None and calls.beyond_memory(dy)):
            run = _differentiable
        assert dy is not None
        x, weight, _ = tensors
        saved = kept[0] if kept else None
        return run_backward(dy, saved, x, weight, self.activation, needs, run)


class LinearAct(torch.autograd.Function):
    """The one autograd formula of the family; backends sit below it.

    Kept for the backward: x where dW is wanted, the weight where dx is, and what the activation's
    derivative reads. A pre-activation is an output of its own, hidden from the caller, so that
    second derivatives flow through it to x, weight and bias without computing it again.
    """

    @classmethod
    def apply(cls, x: Tensor, weight: Tensor, bias: Tensor | None, formula: Formula) -> Tensor:  # type: ignore[override]
        """act(x Wᵀ + b), differentiable to any order."""
        y = super().apply(x, weight, bias, formula)
        return y[0] if formula.saved == "pre" else y  # type: ignore[no-any-return]

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, formula: Formula
    ) -> Tensor | tuple[Tensor, Tensor]:
        """act(x Wᵀ + b), and the pre-activation (M, N) where the backward reads it."""
        y, pre = formula.forward(x, weight, bias)
        saved = {"none": None, "output": y, "pre": pre}[formula.saved]
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None, saved)
        ctx.formula = formula
        ctx.shape = y.shape
        ctx.set_materialize_grads(False)
        return y if pre is None else (y, pre)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dpre: Tensor | None = None) -> tuple[Any, ...]:
        """(dx, dW, db, None).

        dpre is the gradient of the hidden output, which only second derivatives have.
        """
        if dy is None and dpre is None:
            return None, None, None, None
        x, weight, saved = ctx.saved_tensors
        needs = calls.wanted(ctx)[:3]
        formula = ctx.formula
        return (*formula.gradients(dy, dpre, ctx.shape, (x, weight, None), (saved,), needs), None)


# torch.autograd.Function's own apply without its Python, which looks for transforms only.
_apply = super(torch.autograd.Function, LinearAct).apply  # type: ignore[misc]


def applied(
    formula: Formula,
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """``LinearAct`` with this formula, for plain tensors outside torch.func's transforms."""
    if formula.saved == "pre":
        return lambda x, weight, bias: _apply(x, weight, bias, formula)[0]  # type: ignore[no-any-return]
    return lambda x, weight, bias: _apply(x, weight, bias, formula)  # type: ignore[no-any-return]


def run_backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    activation: str,
    needs: tuple[bool, ...],
    run: Callable[..., Any],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``run`` on matrices: dy (..., N), saved, x (..., K) → dx (..., K), dW (N, K), db (N,).

    x may be None where dW is not needed, weight where dx is not.
    """
    if dy.is_neg():
        dy = dy.resolve_neg()
    if dy.dim() == 2:  # so are the others; views cost a microsecond each
        if not dy.is_contiguous():
            dy = dy.contiguous()
        found: Gradients = run(dy, saved, x, weight, activation, needs)
        return found
    n = dy.shape[-1]
    m = dy.shape[:-1].numel()
    dy2 = dy.reshape(m, n)
    if not dy2.is_contiguous():  # an expanded gradient, as sum() makes
        dy2 = dy2.contiguous()
    saved2 = None if saved is None else saved.reshape(m, n)
    x2 = None if x is None else x.reshape(m, x.shape[-1])
    dx, dw, db = run(dy2, saved2, x2, weight, activation, needs)
    return (None if dx is None else dx.view(*dy.shape[:-1], dx.shape[-1])), dw, db


def _differentiable_grad_pre(
    dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """``grad_pre`` whose results are differentiable in dy and saved where gradients are enabled."""
    act = activation_of(activation)
    if saved is None:
        return reference.grad_pre(dy, saved, activation, need_bias_grad)
    from fastlinear.families.linear import higher_order  # few calls come here

    fused = higher_order.passes_pay(dy, activation)
    dpre = differentiable.grad_pre(act, dy, saved, fused=fused)
    sums = higher_order.bias_gradient if fused else differentiable.BY_TORCH.bias_gradient
    return dpre, sums(dpre) if need_bias_grad else None


def _product(piece: str, a: Tensor, b: Tensor) -> Tensor:
    from fastlinear.families.linear import higher_order

    return higher_order.product(piece, a, b)


_PRODUCTS = partial(_product, "grad_input"), partial(_product, "grad_weight")
_differentiable = backward_from(_differentiable_grad_pre, *_PRODUCTS)


def _plus(dpre: Tensor) -> Callable[..., Any]:
    """The differentiable backward where the pre-activation has a gradient dpre (M, N) besides."""

    def grad_pre(
        dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        total = _differentiable_grad_pre(dy, saved, activation, False)[0] + dpre
        return total, total.sum(0) if need_bias_grad else None

    return backward_from(grad_pre, *_PRODUCTS)
