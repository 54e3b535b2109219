"""The autograd formula of gated_mlp; the backends of its two pieces are given to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.families.gated import reference
from fastlinear.families.gated.saved_memory import READERS, keeps_x, readers_of_x, reads_kept
from fastlinear.families.gated.stacking import (
    NO_BIASES,
    Biases,
    Gradients,
    Needs,
    Pre,
    Weights,
    split_pre,
)
from fastlinear.fastpath import autograd_node
from fastlinear.op import differentiable


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

    node: ClassVar[str] = "GatedMLPBackward"
    kept_readers: ClassVar[tuple[int, ...]] = (READERS, READERS)
    activation: str
    order: str
    save_pre: bool
    run: Callable[..., Any]
    backward: Callable[..., Any]
    forward_name: str
    backward_name: str

    @property
    def kept(self) -> tuple[int, ...]:
        """How the pre-activations are kept: given up to a graph's last backward."""
        how = autograd_node.SPENT if self.save_pre else autograd_node.NOTHING
        return how, how if self.order == "apart" else autograd_node.NOTHING

    @property
    def readers(self) -> tuple[int, ...]:
        """All tensors are read where any is: second derivatives start from them."""
        return readers_of_x(self.save_pre), READERS

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
            tensors: x, three weights, three biases; x is None, or all are, where ``kept`` says
                that the wanted gradients read none of them.
            kept: as ``forward`` gives it after y.
            needs: which gradients are wanted.
            over: whether the memory of ``kept`` may be written over.
        """
        given: Any = tensors
        wanted: Any = tuple(needs)
        x, weights, biases = given[0], Weights(*given[1:4]), Biases(*given[4:7])
        names = self.activation, self.order
        pre: Any = None if kept[0] is None else kept
        # create_graph wants differentiable gradients; batches of them are for PyTorch's own ops
        if torch.is_grad_enabled() or calls.batched(dy):
            if x is None:
                return differentiable_of_down(dy, pre, *names, wanted)
            return differentiable.gradients(self._by_ops, tensors, needs, dy)  # type: ignore[return-value]
        return run_backward(dy, pre, x, weights, biases, *names, wanted, self.backward, over)

    def _by_ops(self, x: Tensor, *parameters: Any) -> Tensor:
        """y by PyTorch's own ops."""
        weights, biases = Weights(*parameters[:3]), Biases(*parameters[3:])
        return reference.gated_mlp(x, weights, biases, self.activation, self.order)


class GatedMLP(torch.autograd.Function):
    """The one autograd formula of the family; backends sit below it.

    Kept for the backward are x and the two pre-activations, or x alone; never what the gate lets
    through. Where no more than the down projection is trained, x is not kept besides the
    pre-activations, and for its bias alone nothing is.
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
        # The same is kept for the same gradients as by the node in C++: a checkpoint counts on it.
        y, *pre = formula.forward(x, weights, biases)
        needs = ctx.needs_input_grad[:7]
        held = x if keeps_x(needs, formula.save_pre) else None
        every = (held, *weights, *biases, *pre)
        ctx.save_for_backward(*(every if reads_kept(needs) else [None] * len(every)))
        ctx.formula = formula
        return y  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Seven gradients and None; differentiable by torch's own ops where a graph is asked."""
        saved = ctx.saved_tensors
        needs = calls.wanted(ctx)[:7]
        return (*ctx.formula.gradients(dy, None, dy.shape, saved[:7], saved[7:], needs), None)


def as_rows(x: Tensor) -> Tensor:
    """(..., K) as (M, K); a copy where no view can be."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def run_backward(
    dy: Tensor,
    pre: Pre | None,
    x: Tensor | None,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    needs: Needs,
    run: Callable[..., Any],
    over: bool = False,
) -> Gradients:
    """Call a backward backend for x (..., K) and dy of y's shape; dx has x's shape. ``over`` gives
    the memory of pre away. x is None where no more than the down projection is wanted."""
    rows = _dense(dy)
    if x is None:  # nothing of what is not kept is read; dy stands in its place
        weights, biases = Weights(rows, None, rows), NO_BIASES
    inputs = rows if x is None else as_rows(x)
    dx, *others = run(rows, pre, inputs, weights, biases, activation, order, needs, over)
    return (None if dx is None or x is None else dx.view(x.shape)), *others


def differentiable_of_down(
    dy: Tensor, pre: Pre | None, activation: str, order: str, needs: Needs
) -> Gradients:
    """The gradients of the down projection and no others by torch's own differentiable ops, of dy
    of y's shape and, for the weight's, the pre-activations."""
    rows, weight = as_rows(dy), None
    if needs[3]:
        assert pre is not None
        gate, up = split_pre(pre, order)
        weight = rows.t() @ (activation_of(activation).value(gate) * up)
    return None, None, None, weight, None, None, rows.sum(0) if needs[6] else None


def _dense(dy: Tensor) -> Tensor:
    """dy (..., N) as dense rows."""
    rows = as_rows(dy.resolve_neg())
    return rows if rows.is_contiguous() else rows.contiguous()  # expanded, as sum() makes it
