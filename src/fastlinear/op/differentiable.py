"""Gradients that can be differentiated again: by PyTorch's own ops, or fused passes.

Of a smooth activation dpre = e act'(saved), its derivatives, and theirs again are one pass each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlinear.activations.reference import SMOOTH, Activation
from fastlinear.core import calls
from fastlinear.dispatch.backend import is_installed
from fastlinear.fastpath import autograd_node

Derivative = Callable[[Tensor, Tensor], Tensor]


class Multiply(NamedTuple):
    """What a layer's gradients are computed by, differentiable.

    Attributes:
        product: (piece of linear_act, its operands) → it; see :func:`by_torch`.
        bias_gradient: dpre (M, N) → its column sums (N,).
    """

    product: Callable[[str, Tensor, Tensor], Tensor]
    bias_gradient: Callable[[Tensor], Tensor]


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
        for t in wanted:
            if not t.requires_grad:  # a constant has a gradient, too
                t.requires_grad_()
        found = iter(torch.autograd.grad(run(*own), wanted, dys, create_graph=True))
    pairs = zip(own, needs, strict=True)
    return tuple([next(found) if need and t is not None else None for t, need in pairs])


def grad_pre(act: Activation, dy: Tensor, saved: Tensor, *, fused: bool = False) -> Tensor:
    """dy * act'(pre), differentiable in dy and in what was saved where gradients are enabled.

    Args:
        fused: its own derivatives in one pass each, where there are such passes.
    """
    if not torch.is_grad_enabled():
        return act.backward(dy, saved)
    if fused and in_memory(dy, saved) and passes_of(act, saved) is not None:
        dpre: Tensor = _apply(_GradPre, act, *_dense(dy, saved))
        return dpre
    return _grad_pre(act, dy, saved)


def _grad_pre(act: Activation, dy: Tensor, saved: Tensor) -> Tensor:
    """The same by PyTorch's own ops."""
    if act.saved != "pre":
        return act.backward(dy, saved)
    pre = saved.view_as(saved)  # a node of its own, at which this gradient stops
    (dpre,) = torch.autograd.grad(act.value(pre), pre, dy, create_graph=True)
    return dpre


def activated(act: Activation, pre: Tensor, *, fused: bool = False) -> Tensor:
    """act(pre), whose derivatives are those of :func:`grad_pre`."""
    if fused and act.saved == "pre" and in_memory(pre) and passes_of(act, pre) is not None:
        y: Tensor = _apply(_Activated, act, pre.contiguous())
        return y
    return act.value(pre)


def in_memory(*tensors: Tensor) -> bool:
    """Whether these are numbers in memory, of one dtype, that nobody watches."""
    if torch.compiler.is_compiling() or calls.watched() or calls.beyond_memory(*tensors):
        return False
    plain = all(type(t) in calls.PLAIN and not t.is_neg() for t in tensors)
    return plain and all(t.dtype is tensors[0].dtype for t in tensors)


def passes_of(act: Activation, t: Tensor) -> Any:
    """The module with ``second`` and ``third`` for such tensors, or None."""
    if act.name not in SMOOTH:
        return None
    if t.device.type == "cpu":
        from fastlinear.kernels.cpu import elementwise

        served = t.dtype is torch.float32 and elementwise.why_not_loaded() is None
        return elementwise if served else None
    if not t.is_cuda or t.dtype is torch.float64 or not is_installed("triton"):
        return None
    from fastlinear.kernels.triton import elementwise as by_triton

    return by_triton


def _dense(*tensors: Tensor) -> list[Tensor]:
    return [t.contiguous() for t in tensors]  # hooks on saved tensors may have laid them otherwise


def _apply(function: type[torch.autograd.Function], *given: Any) -> Any:
    return function.apply(*given)


class _Activated(torch.autograd.Function):
    """act(pre) of a smooth activation that keeps pre."""

    @staticmethod
    def forward(ctx: Any, act: Activation, pre: Tensor) -> Tensor:
        """Of pre's shape."""
        ctx.save_for_backward(pre)
        ctx.act = act
        return act.value(pre)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(None, dpre)."""
        (pre,) = ctx.saved_tensors
        return None, grad_pre(ctx.act, dy, pre, fused=True)


class _GradPre(torch.autograd.Function):
    """dpre = e act'(saved) of a smooth activation."""

    @staticmethod
    def forward(ctx: Any, act: Activation, e: Tensor, saved: Tensor) -> Tensor:
        """Of e's shape."""
        ctx.save_for_backward(e, saved)
        ctx.act = act
        return act.backward(e, saved)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """(None, the gradients of e and saved)."""
        e, saved = ctx.saved_tensors
        if not in_memory(g, e, saved):
            return None, *_second(ctx.act, g, e, saved)
        return None, *_apply(_Second, ctx.act, *_dense(g, e, saved))


class _Second(torch.autograd.Function):
    """g times the derivatives of e act'(saved) by e and by saved."""

    @staticmethod
    def forward(
        ctx: Any, act: Activation, g: Tensor, e: Tensor, saved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Each of g's shape."""
        ctx.save_for_backward(g, e, saved)
        ctx.act = act
        found: tuple[Tensor, Tensor] = passes_of(act, saved).second(act.name, g, e, saved)
        return found

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Any, ...]:
        """(None, the gradients of g, e and saved); by PyTorch's own ops for a graph of them."""
        act, given = ctx.act, ctx.saved_tensors
        if torch.is_grad_enabled() or not in_memory(a, b, *given):
            run = partial(_second, act)
            return None, *gradients(run, given, calls.wanted(ctx)[1:], (a, b))
        return None, *passes_of(act, given[0]).third(act.name, *_dense(a, b, *given))


def _second(act: Activation, g: Tensor, e: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
    """What ``_Second`` computes by PyTorch's own ops."""

    def run(e: Tensor, saved: Tensor) -> Tensor:
        return _grad_pre(act, e, saved)

    found = gradients(run, (e, saved), (True, True), g)
    return tuple(t for t in found if t is not None)


def known_layer(
    known: Tensor,
    derivative: Derivative | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiply: Multiply | None = None,
) -> Tensor:
    """A linear layer of which is known what its backward reads, so that nothing is computed.

    Its gradients can be differentiated again.

    Args:
        known: (M, N): the pre-activation, or the output, whose ``derivative`` is given:
            (dy, output) → the gradient of the pre-activation.
        x, weight, bias: (M, K), (N, K) and (N,) or None.
        multiply: the backward's; None for PyTorch's.
    """
    result: Tensor
    if multiply is None and autograd_node.begun():
        result = autograd_node.known_layer(known, derivative, x, weight, bias)
    else:
        result = _apply(_KnownLayer, known, derivative, x, weight, bias, multiply or BY_TORCH)
    return result


def by_torch(piece: str, a: Tensor, b: Tensor) -> Tensor:
    """A layer's product by PyTorch: a bᵀ of ``"forward"``, a b of ``"grad_input"``, aᵀ b of
    ``"grad_weight"``."""
    return (a.t() if piece == "grad_weight" else a) @ (b.t() if piece == "forward" else b)


BY_TORCH = Multiply(by_torch, lambda dpre: dpre.sum(0))


class _KnownLayer(torch.autograd.Function):
    """The same where there is no C++, or products are others."""

    @staticmethod
    def forward(
        ctx: Any,
        known: Tensor,
        derivative: Derivative | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        multiply: Multiply,
    ) -> Tensor:
        """``known``, as a tensor of its own."""
        gave = known.view_as(known)
        ctx.derivative, ctx.multiply = derivative, multiply
        ctx.save_for_backward(x, weight, None if derivative is None else gave)
        return gave

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(None, None, dx, dW, db, None)."""
        x, weight, gave = ctx.saved_tensors
        dpre = dy if gave is None else ctx.derivative(dy, gave)
        need_x, need_weight, need_bias = calls.wanted(ctx)[2:5]
        product, bias_gradient = ctx.multiply
        dx = product("grad_input", dpre, weight) if need_x else None
        dw = product("grad_weight", dpre, x) if need_weight else None
        return None, None, dx, dw, bias_gradient(dpre) if need_bias else None, None
