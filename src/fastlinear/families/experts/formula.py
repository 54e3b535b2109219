"""The autograd formula of experts over the backends that sort slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.core import calls
from fastlinear.core.errors import InputError
from fastlinear.families.experts import reference, routed
from fastlinear.families.experts.routed import Kept, Routing, Way, Weights
from fastlinear.fastpath import autograd_node
from fastlinear.op import differentiable


@dataclass(frozen=True, slots=True)
class Formula:
    """What calls of one kind need besides their tensors.

    Attributes:
        way: how they are computed.
        recompute: whether x alone is kept, and the backward forms the pre-activations again.
    """

    node: ClassVar[str] = "ExpertsBackward"
    kept_readers: ClassVar[None] = None
    readers: ClassVar[tuple[int, ...]] = (-1,)
    way: Way
    recompute: bool

    @property
    def kept(self) -> tuple[int, ...]:
        """How the slots' order and places, the sizes and the pre-activations are kept."""
        own = autograd_node.NOTHING if self.recompute else autograd_node.INTERNAL
        return (*(autograd_node.INTERNAL,) * 3, own)

    def inference(self, x: Tensor, weights: Weights, routing: Routing) -> Tensor:
        """y (T, H)."""
        return routed.forward(self.way, x, weights, routing)[0]

    def forward(self, x: Tensor, weights: Weights, routing: Routing) -> tuple[Tensor | None, ...]:
        """y, then what is kept."""
        y, kept = routed.forward(self.way, x, weights, routing)
        return (y, *(kept._replace(pre=None) if self.recompute else kept))

    def gradients(
        self,
        dy: Tensor,
        _: None,
        __: tuple[int, ...],
        tensors: tuple[Any, ...],
        kept: tuple[Any, ...],
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """Seven, by PyTorch's differentiable ops where a graph or a transform asks.

        Args:
            dy: gradient of y, of its shape.
            tensors: x, gate_up, down, topk_index, topk_weight and the biases.
            kept: as ``forward`` gives it after y.
            needs: which gradients are wanted.
        """
        x, weights, routing = tensors[0], tensors[1:3], tensors[3:]
        _check_shapes(dy, x, weights, routing, kept)
        if torch.is_grad_enabled() or calls.beyond_memory(dy):
            return differentiable.gradients(self._by_ops, tensors, needs, dy)
        return routed.backward(self.way, dy, x, weights, routing, Kept(*kept), needs)

    def _by_ops(self, x: Tensor, *rest: Any) -> Tensor:
        return reference.experts(x, rest[:2], rest[2:], self.way.gate, self.way.first)


class Experts(torch.autograd.Function):
    """The formula in Python."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        topk_index: Tensor,
        topk_weight: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        formula: Formula,
    ) -> Tensor:
        """y (T, H)."""
        routing = topk_index, topk_weight, gate_up_bias, down_bias
        y, *kept = formula.forward(x, (gate_up, down), routing)
        assert y is not None
        # The same in the same order as by the node in C++: a checkpoint counts on it.
        ctx.save_for_backward(x, gate_up, down, *routing, *kept)
        ctx.formula = formula
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Seven gradients and None."""
        saved, needs = ctx.saved_tensors, calls.wanted(ctx)[:7]
        return (*ctx.formula.gradients(dy, None, dy.shape, saved[:7], saved[7:], needs), None)


def _check_shapes(dy: Tensor, x: Tensor, weights: Weights, routing: Routing, kept: Any) -> None:
    """The tensors of a backward are still as those of its forward; ``.data`` may change them."""
    gate_up, down = weights
    index, weight, *biases = routing
    order, _, sizes, pre = kept
    (experts, both, h), slots = gate_up.shape, (order.shape[0],)
    fits = (
        dy.shape == x.shape
        and x.shape == (index.shape[0], h)
        and down.shape == (experts, h, both // 2)
        and index.shape == weight.shape
        and (index.numel(),) == slots
        and sizes.shape == (experts,)
        and (pre is None or pre.shape == (*slots, both))
        and all(
            b is None or b.shape == (experts, n) for b, n in zip(biases, (both, h), strict=True)
        )
    )
    if not fits:
        raise InputError(
            "experts",
            "tensors of the shapes they had in the forward",
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, topk_index {tuple(index.shape)}",
            "Give tensors other data before the forward or behind the backward.",
        )
