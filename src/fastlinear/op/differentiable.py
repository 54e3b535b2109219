"""Gradients by PyTorch's own ops, which can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import Activation
from fastlinear.core import calls
from fastlinear.fastpath import autograd_node

Derivative = Callable[[Tensor, Tensor], Tensor]


def gradients(
    run: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    dys: Any,
) -> tuple[Tensor | None, ...]:
    """A gradient for each of the tensors, None where it is not wanted or there is no tensor.

    Args:
        run: the tensors → the result or results, by differentiable ops.
        needs: which gradients are wanted.
        dys: the gradient of the result, or of each.
    """
    # Views make each argument a node of its own: one may depend on another, or two be one tensor,
    # and each gradient must stop at its argument.
    with torch.enable_grad():
        own = [None if t is None else t.view_as(t) for t in tensors]
        wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(run(*own), wanted, dys, create_graph=True))
    pairs = zip(own, needs, strict=True)
    return tuple([next(found) if need and t is not None else None for t, need in pairs])


def grad_pre(act: Activation, dy: Tensor, saved: Tensor) -> Tensor:
    """dy * act'(pre), differentiable in dy and in what was saved where gradients are enabled."""
    if act.saved != "pre" or not torch.is_grad_enabled():
        return act.backward(dy, saved)
    pre = saved.view_as(saved)  # a node of its own, at which this gradient stops
    (dpre,) = torch.autograd.grad(act.value(pre), pre, dy, create_graph=True)
    return dpre


def known_layer(
    known: Tensor, derivative: Derivative | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """A linear layer of which is known what its backward reads, so that nothing is computed.

    Its gradients are PyTorch's own ops, which can be differentiated again.

    Args:
        known: (M, N): the pre-activation, or the output, whose ``derivative`` is given:
            (dy, output) → the gradient of the pre-activation.
        x, weight, bias: (M, K), (N, K) and (N,) or None.
    """
    make = autograd_node.known_layer if autograd_node.begun() else _KnownLayer.apply
    result: Tensor = make(known, derivative, x, weight, bias)
    return result


class _KnownLayer(torch.autograd.Function):
    """The same where there is no C++."""

    @staticmethod
    def forward(
        ctx: Any,
        known: Tensor,
        derivative: Derivative | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """``known``, as a tensor of its own."""
        gave = known.view_as(known)
        ctx.derivative = derivative
        ctx.save_for_backward(x, weight, None if derivative is None else gave)
        return gave

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(None, None, dx, dW, db)."""
        x, weight, gave = ctx.saved_tensors
        dpre = dy if gave is None else ctx.derivative(dy, gave)
        need_x, need_weight, need_bias = calls.wanted(ctx)[2:]
        dx = dpre @ weight if need_x else None
        dw = dpre.t() @ x if need_weight else None
        return None, None, dx, dw, dpre.sum(0) if need_bias else None
