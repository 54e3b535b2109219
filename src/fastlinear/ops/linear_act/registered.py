"""linear_act as registered ops, for torch.compile and export: schema, fake, autograd."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastlinear.op.compile import Backends
from fastlinear.ops._register import register_op
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act import reference
from fastlinear.ops.linear_act.autograd import backward_from, backward_of, run_backward
from fastlinear.ops.linear_act.spec import SPEC

_BACKENDS = Backends(SPEC)


def _saves_pre(activation: str, needs_grad: bool) -> bool:
    return needs_grad and activation_of(activation).saved == "pre"


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, needs_grad: bool, backend: str
) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    # one that cannot serve is refused of empty tensors too
    run = _BACKENDS.forward((x, weight, bias, activation, backend or None), needs_grad)
    if x.numel() == 0 or weight.numel() == 0:
        run = reference.forward
    if bias is not None:
        bias = bias.contiguous()
    x2 = x.reshape(x.shape[:-1].numel(), k)
    y, pre = run(x2, weight, bias, activation, _saves_pre(activation, needs_grad))
    y = y.contiguous().view(*x.shape[:-1], n)
    return y, x.new_empty(0) if pre is None else pre.contiguous()


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, needs_grad: bool, backend: str
) -> tuple[Tensor, Tensor]:
    n = weight.shape[0]
    y = x.new_empty((*x.shape[:-1], n))
    if not _saves_pre(activation, needs_grad):
        return y, x.new_empty(0)
    return y, x.new_empty((math.prod(x.shape[:-1]), n))  # torch.Size.numel would fix M


def _backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    has_bias: bool,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0 or weight.numel() == 0:
        run = backward_from(reference.grad_pre, reference.grad_input, reference.grad_weight)
    else:
        bias = weight.new_empty(weight.shape[0]) if has_bias else None
        run = backward_of(_BACKENDS.choices((x, weight, bias, activation, None), True))
    grads = run_backward(dy, saved, x, weight, activation, (needs_x, needs_weight, needs_bias), run)
    return tuple(x.new_empty(0) if g is None else g.contiguous() for g in grads)  # type: ignore[return-value]


def _backward_fake(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    has_bias: bool,
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
    x, weight, bias, activation, needs_grad, _ = inputs
    y, pre = output
    kind = activation_of(activation).saved
    saved = y if kind == "output" else pre if _saves_pre(activation, needs_grad) else None
    ctx.save_for_backward(x, weight, bias, saved)
    ctx.activation = activation
    ctx.mark_non_differentiable(pre)


def _autograd(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, bias, saved = ctx.saved_tensors
    if saved is None and activation_of(ctx.activation).saved == "pre":
        saved = torch.nn.functional.linear(x, weight, bias)
        saved = saved.reshape(math.prod(x.shape[:-1]), weight.shape[0])
    needs = ctx.needs_input_grad
    grads = torch.ops.fastlinear.linear_act_backward(
        dy, saved, x, weight, ctx.activation, bias is not None, needs[0], needs[1], needs[2]
    )
    wanted = (g if need else None for g, need in zip(grads, needs[:3], strict=True))
    return (*wanted, None, None, None)


register_op(
    "linear_act",
    implementation=_forward,
    fake=_forward_fake,
    backward=_autograd,
    setup_context=_setup_context,
)
register_op(
    "linear_act_backward",
    implementation=_backward,
    fake=_backward_fake,
)
