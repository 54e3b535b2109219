"""diagonal_linear as registered ops, for torch.compile and export: schema, fake, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.op.compile import Backends
from fastlinear.ops._register import register_op
from fastlinear.ops.diagonal_linear import reference
from fastlinear.ops.diagonal_linear.autograd import run_backward
from fastlinear.ops.diagonal_linear.spec import SPEC

_BACKENDS = Backends(SPEC)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    needs_grad: bool,
    backend: str,
) -> Tensor:
    run: Callable[..., Any] = reference.forward
    if x.numel() or backend:  # one that cannot serve is refused of empty tensors too
        call = x, weight, (bias, residual), activation, backend or None
        found = _BACKENDS.forward(call, needs_grad)
        run = found if x.numel() else run
    x2 = _rows(x)
    r2 = None if residual is None else _rows(residual)
    bias = None if bias is None else bias.contiguous()
    y = run(x2, weight.contiguous(), bias, activation, r2, None)
    return y.contiguous().view(x.shape)  # type: ignore[no-any-return]


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    needs_grad: bool,
    backend: str,
) -> Tensor:
    return x.new_empty(x.shape)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    run: Callable[..., Any] = reference.backward
    if x.numel():
        run = _BACKENDS.backward((x, weight, (bias, None), activation, None))
    bias = None if bias is None else bias.contiguous()
    needs = needs_x, needs_weight, needs_bias
    grads = run_backward(dy, x, weight.contiguous(), bias, activation, needs, run)
    return tuple(x.new_empty(0) if g is None else g.contiguous() for g in grads)  # type: ignore[return-value]


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    k = weight.shape[0]
    return (
        x.new_empty(x.shape if needs_x else (0,)),
        x.new_empty(k if needs_weight else 0),
        x.new_empty(k if needs_bias else 0),
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _, activation, _, _ = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.activation = activation


def _autograd(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grads: tuple[Any, ...] = (None, None, None)
    if any(needs[:3]):
        grads = torch.ops.fastlinear.diagonal_linear_backward(
            dy, x, weight, bias, ctx.activation, needs[0], needs[1], needs[2]
        )
    wanted = (g if need else None for g, need in zip(grads, needs[:3], strict=True))
    return (*wanted, dy if needs[3] else None, None, None, None)


register_op(
    "diagonal_linear",
    implementation=_forward,
    fake=_forward_fake,
    backward=_autograd,
    setup_context=_setup_context,
)
register_op(
    "diagonal_linear_backward",
    implementation=_backward,
    fake=_backward_fake,
)
