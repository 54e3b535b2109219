"""grouped_linear as registered ops, for torch.compile and export: schema, fake, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.op.compile import Backends
from fastlinear.ops._register import register_op
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import reference
from fastlinear.ops.grouped_linear.autograd import run_backward
from fastlinear.ops.grouped_linear.spec import SPEC

_BACKENDS = Backends(SPEC)


def _saves_pre(activation: str, needs_grad: bool) -> bool:
    return needs_grad and activation_of(activation).saved == "pre"


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    needs_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    groups, _, k = weight.shape
    order = layouts.order_of(layout, x.shape)
    rows = layouts.blocks(x, layout, groups, k)

    run: Callable[..., Any] = reference.forward
    if x.numel() * weight.numel():
        run = _BACKENDS.forward((x, weight, bias, activation, layout, backend or None), needs_grad)
    y, pre = run(rows, weight, bias, activation, _saves_pre(activation, needs_grad), order)
    y = layouts.unblocked(y, layout, x.shape)
    return y, x.new_empty(0) if pre is None else layouts.unblocked(pre, layout, x.shape)


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    needs_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    shape = layouts.output_shape(layout, x.shape, weight.shape[0], weight.shape[1])
    saves = _saves_pre(activation, needs_grad)
    return x.new_empty(shape), x.new_empty(shape if saves else 0)


def _backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    layout: str,
    has_bias: bool,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    run: Callable[..., Any] = reference.backward
    if x.numel() * weight.numel():
        bias = weight.new_empty(weight.shape[:2]) if has_bias else None
        run = _BACKENDS.backward((x, weight, bias, activation, layout, backend or None))
    needs = (needs_x, needs_weight, needs_bias)
    grads = run_backward(dy, saved, x, weight, activation, layout, needs, run)
    dx, dw, db = (x.new_empty(0) if g is None else g.contiguous() for g in grads)
    return dx, dw, db


def _backward_fake(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    layout: str,
    has_bias: bool,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if needs_x else (0,)),
        x.new_empty(weight.shape if needs_weight else (0,)),
        x.new_empty(weight.shape[:2] if needs_bias else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, activation, layout, needs_grad, backend = inputs
    y, pre = output
    kind = activation_of(activation).saved
    saved = y if kind == "output" else pre if _saves_pre(activation, needs_grad) else None
    ctx.save_for_backward(x, weight, bias, saved)
    ctx.call = activation, layout
    ctx.backend = backend
    ctx.mark_non_differentiable(pre)


def _autograd(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, bias, saved = ctx.saved_tensors
    activation, layout = ctx.call
    if saved is None and activation_of(activation).saved == "pre":
        # the caller asked for no gradients when it was traced
        saved = reference.grouped_linear(x, weight, bias, "none", layout)
    needs = ctx.needs_input_grad
    grads = torch.ops.fastlinear.grouped_linear_backward(
        *(dy, saved, x, weight, activation, layout, bias is not None),
        *(needs[0], needs[1], needs[2], ctx.backend),
    )
    wanted = (g if need else None for g, need in zip(grads, needs[:3], strict=True))
    return (*wanted, None, None, None, None)


register_op(
    "grouped_linear",
    implementation=_forward,
    fake=_forward_fake,
    backward=_autograd,
    setup_context=_setup_context,
)
register_op(
    "grouped_linear_backward",
    implementation=_backward,
    fake=_backward_fake,
)
