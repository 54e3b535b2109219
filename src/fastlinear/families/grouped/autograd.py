"""The autograd formula of grouped_linear; the backends of its two pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.reference import Gradients, Needs
from fastlinear.families.grouped.sign_mask import SIGNS, AnyPlace, is_sign_mask
from fastlinear.fastpath import autograd_node
from fastlinear.op import differentiable

_KEPT = {
    "none": (),
    "output": (autograd_node.OUTPUT,),
    "pre": (autograd_node.INTERNAL,),
    SIGNS: (autograd_node.INTERNAL,),
}


@dataclass(frozen=True, slots=True)
class Formula:
    """What one plan's autograd needs besides its tensors.

    Attributes:
        activation: its name.
        layout: x's, a name in ``layout.LAYOUTS``.
        forward_name, backward_name: the backends of the two pieces.
        run: the forward's backend.
        backward: the backward's backend.
        sign_mask: where the signs of y are, if they are what these two keep.
    """

    node: ClassVar[str] = "GroupedLinearBackward"
    readers: ClassVar[tuple[int, ...]] = (-1,)  # all are kept: second derivatives start from them
    kept_readers: ClassVar[None] = None
    activation: str
    layout: str
    forward_name: str
    backward_name: str
    run: Callable[..., Any]
    backward: Callable[..., Any]
    sign_mask: AnyPlace | None = None

    @property
    def saved(self) -> str:
        """What is kept for the backward: ``"none"``, ``"output"``, ``"pre"`` or ``"signs"``.

        Second derivatives start from x, weight and bias alone.
        """
        return activation_of(self.activation).saved if self.sign_mask is None else SIGNS

    @property
    def kept(self) -> tuple[int, ...]:
        """How ``saved`` is kept."""
        return _KEPT[self.saved]

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(y, the pre-activation or signs where these are kept), numbers in the layout."""
        groups, _, k = weight.shape
        order = layouts.order_of(self.layout, x.shape)
        rows = layouts.blocks(x, self.layout, groups, k)
        how = self.activation, self.saved == "pre", order
        if self.sign_mask is not None:
            y, sign_mask = self.run(rows, weight, bias, *how, sign_mask=self.sign_mask)
            return layouts.result(y, self.layout, x.shape), sign_mask
        y, pre = self.run(rows, weight, bias, *how)
        y = layouts.result(y, self.layout, x.shape)
        return y, None if pre is None else layouts.unblocked(pre, self.layout, x.shape)

    def gradients(
        self,
        dy: Tensor,
        _hidden: None,
        shape: tuple[int, ...],
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
    ) -> Gradients:
        """(dx, dW, db), differentiable where a graph is asked for.

        Args:
            dy: gradient of y, of its shape.
            tensors: x, weight, bias.
            kept: y or the pre-activation in the layout, whichever the activation keeps, or signs
                of y, if any.
            needs: which gradients are wanted.
        """
        x, weight, _ = tensors
        wanted: Any = tuple(needs)
        assert x is not None
        assert weight is not None
        names = self.activation, self.layout
        # create_graph wants differentiable gradients; batches of them are for PyTorch's own ops
        if torch.is_grad_enabled() or calls.batched(dy):
            run = partial(reference.grouped_linear, activation=names[0], layout=names[1])
            dx, dw, db = differentiable.gradients(run, tensors, needs, dy)
            return dx, dw, db
        saved = kept[0] if kept else None
        return run_backward(dy, saved, x, weight, *names, wanted, self.backward)


class GroupedLinear(torch.autograd.Function):
    """The one autograd formula of the family; backends sit below it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, formula: Formula
    ) -> Tensor:
        """act(x_g W_gᵀ + b_g), x and y in the formula's layout."""
        y, made = formula.forward(x, weight, bias)
        saved = {"none": None, "output": y, "pre": made, SIGNS: made}[formula.saved]
        # The same is kept whatever is wanted, as by the node in C++: a checkpoint counts on it.
        ctx.save_for_backward(x, weight, bias, saved)
        ctx.formula = formula
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(dx, dW, db, None); differentiable by torch's own ops where a graph is asked for."""
        saved, needs = ctx.saved_tensors, calls.wanted(ctx)[:3]
        return (*ctx.formula.gradients(dy, None, dy.shape, saved[:3], saved[3:], needs), None)


def run_backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    layout: str,
    needs: Needs,
    run: Callable[..., Any],
) -> Gradients:
    """Call a backward backend for tensors in the layout; dx has x's shape."""
    groups, n, k = weight.shape
    order = layouts.order_of(layout, x.shape)
    rows = layouts.blocks(x, layout, groups, k)
    tokens = rows.shape[:3]
    if saved is not None and not is_sign_mask(saved):
        saved = layouts.blocks(saved, layout, groups, n).reshape(*tokens, n)
    grad = layouts.blocks(dy.resolve_neg(), layout, groups, n).reshape(*tokens, n)
    dx, dw, db = run(grad, saved, rows, weight, activation, needs, order)
    return (None if dx is None else layouts.unblocked(dx, layout, x.shape)), dw, db
