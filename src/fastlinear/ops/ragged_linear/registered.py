"""ragged_linear as registered ops, for torch.compile and export: schema, fake, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlinear.op.compile import Backends
from fastlinear.ops._register import register_op
from fastlinear.ops.common import calls
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.ragged_linear import products
from fastlinear.ops.ragged_linear.formula import Formula
from fastlinear.ops.ragged_linear.spec import SPEC

_BACKENDS = Backends(SPEC)


def _saves_pre(activation: str, needs_grad: bool) -> bool:
    return needs_grad and activation_of(activation).saved == "pre"


def _formula(
    activation: str,
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None,
    grad: bool,
) -> Formula | None:
    """The formula of what serves such a call; None for PyTorch's own products."""
    if calls.transforms_active() or calls.watched() or not x.numel() * weight.numel():
        return None
    call = x, weight, (group_sizes, bias), activation, None
    chosen = _BACKENDS.choices(call, grad)[0].backend.name
    return None if chosen == "eager" else Formula(activation, chosen)


def _forward(
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    save_pre = _saves_pre(activation, needs_grad)
    formula = _formula(activation, x, weight, group_sizes, bias, needs_grad)
    if formula is not None:
        run = formula.functions()[0]
        y, pre, _ = run(x, weight, group_sizes, bias, activation, save_pre)
    else:
        y, pre = products.loop(x, weight, group_sizes, bias, activation), None
        if save_pre:
            pre = products.loop(x, weight, group_sizes, bias, "none")
    return y, x.new_empty(0) if pre is None else pre


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], weight.shape[1])
    saves = _saves_pre(activation, needs_grad)
    return x.new_empty(shape), x.new_empty(shape if saves else 0)


def _backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    formula = _formula(activation, x, weight, group_sizes, bias, True)
    if formula is not None:
        run = formula.functions()[1]
        grads = run(dy, saved, x, weight, group_sizes, activation, tuple(needs))
    else:
        own = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
        wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
        with torch.enable_grad():
            y = products.loop(own[0], own[1], group_sizes, own[2], activation)  # type: ignore[arg-type]
            found = iter(torch.autograd.grad(y, wanted, dy))
        made = zip(own, needs, strict=True)
        grads = tuple(next(found) if need and t is not None else None for t, need in made)  # type: ignore[assignment]
    dx, dw, db = (x.new_empty(0) if g is None else g.contiguous() for g in grads)
    return dx, dw, db


def _backward_fake(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if needs[0] else (0,)),
        x.new_empty(weight.shape if needs[1] else (0,)),
        x.new_empty(weight.shape[:2] if needs[2] else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, group_sizes, bias, activation, needs_grad = inputs
    y, pre = output
    kind = activation_of(activation).saved
    saved = y if kind == "output" else pre if _saves_pre(activation, needs_grad) else None
    ctx.save_for_backward(x, weight, group_sizes, bias, saved)
    ctx.activation = activation
    ctx.mark_non_differentiable(pre)


def _autograd(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, group_sizes, bias, saved = ctx.saved_tensors
    activation = ctx.activation
    if saved is None and activation_of(activation).saved == "pre":
        # the caller asked for no gradients when it was traced
        saved = torch.ops.fastlinear.ragged_linear(x, weight, group_sizes, bias, "none", False)[0]
    asked = ctx.needs_input_grad
    needs = [asked[0], asked[1], asked[3]]
    grads = torch.ops.fastlinear.ragged_linear_backward(
        dy, saved, x, weight, group_sizes, bias, activation, needs
    )
    dx, dw, db = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dx, dw, None, db, None, None


register_op(
    "ragged_linear",
    implementation=_forward,
    fake=_forward_fake,
    backward=_autograd,
    setup_context=_setup_context,
)
register_op(
    "ragged_linear_backward",
    implementation=_backward,
    fake=_backward_fake,
)
