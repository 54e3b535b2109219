"""linear_act as registered ops, for torch.compile and export: schema, fake, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlinear.ops._register import register_op
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act import reference
from fastlinear.ops.linear_act.op import _backward_of, _run_backward, choices


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, backend: str
) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    x2 = x.reshape(-1, k)
    if x.numel() == 0 or weight.numel() == 0:
        y, pre = reference.forward(x2, weight, bias, activation, save_pre)
    else:
        chosen = choices(x2, weight, bias, activation, backend or None, save_pre)[0]
        y, pre = chosen.backend.load()(x2, weight, bias, activation, save_pre)
    shape = (*x.shape[:-1], n)
    return y.contiguous().view(shape), x.new_empty(0) if pre is None else pre.contiguous()


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, backend: str
) -> tuple[Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    rows = y.numel() // weight.shape[0] if not save_pre else x.numel() // x.shape[-1]
    return y, x.new_empty((rows, weight.shape[0])) if save_pre else x.new_empty(0)


def _backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    needs = (needs_x, needs_weight, needs_bias)
    if x.numel() == 0 or weight.numel() == 0:
        run = reference.backward
    else:
        run = _backward_of(choices(x, weight, None, activation, None, True)[1:])
    grads = _run_backward(dy, saved, x, weight, activation, needs, run)
    return tuple(x.new_empty(0) if g is None else g.contiguous() for g in grads)  # type: ignore[return-value]


def _backward_fake(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if needs_x else (0,)),
        x.new_empty(weight.shape if needs_weight else (0,)),
        x.new_empty(weight.shape[0] if needs_bias else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, activation, save_pre, _ = inputs
    y, pre = output
    kind = activation_of(activation).saved
    saved = y if kind == "output" else pre if kind == "pre" and save_pre else None
    ctx.save_for_backward(x, weight, bias, saved)
    ctx.activation = activation
    ctx.mark_non_differentiable(pre)


def _autograd(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, bias, saved = ctx.saved_tensors
    if saved is None and activation_of(ctx.activation).saved == "pre":
        saved = torch.nn.functional.linear(x, weight, bias).reshape(-1, weight.shape[0])
    needs = ctx.needs_input_grad
    grads = torch.ops.fastlinear.linear_act_backward(
        dy, saved, x, weight, ctx.activation, needs[0], needs[1], needs[2]
    )
    wanted = (g if need else None for g, need in zip(grads, needs[:3], strict=True))
    return (*wanted, None, None, None)


register_op(
    "linear_act",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, bool save_pre, str backend)"
    " -> (Tensor, Tensor)",
    implementation=_forward,
    fake=_forward_fake,
    backward=_autograd,
    setup_context=_setup_context,
)
register_op(
    "linear_act_backward",
    "(Tensor dy, Tensor? saved, Tensor x, Tensor weight, str activation, bool needs_x,"
    " bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor)",
    implementation=_backward,
    fake=_backward_fake,
)
