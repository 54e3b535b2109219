"""The piece ``step`` of grouped_linear: forward and backward of one layer, as autograd runs them.

As in linear_act: ``eager`` is PyTorch's own autograd, ``pieces`` our formula over the backends
chosen for forward and backward. What the host does for each is part of their time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.precision import matmul_precision
from fastlinear.dispatch import cache
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import reference
from fastlinear.ops.grouped_linear.plans import Plan, training_plan
from fastlinear.ops.grouped_linear.selection import problem_of, select_pieces

Results = tuple[Tensor, Tensor, Tensor, Tensor | None]
LAYOUT_OF = {"tokens": "... g k", "groups": "g ... k", "channels": "b g k ..."}
"""Order of memory → a layout of users in which tensors lie so."""

_plans: dict[Any, Plan] = {}
cache.on_change(_plans.clear)


def eager(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dy: Tensor, order: str
) -> Results:
    """(y, dx, dW, db) by PyTorch's own autograd; x (B, L, G, K), dy (B, L, G, N), dense."""
    return _step(reference.grouped_linear, x, weight, bias, activation, dy, order)


def pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dy: Tensor, order: str
) -> Results:
    """(y, dx, dW, db) by ``GroupedLinear`` over the chosen pieces."""
    return _step(_by_pieces, x, weight, bias, activation, dy, order)


def _by_pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layout: str
) -> Tensor:
    key = (
        *(x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, x.device),
        *(activation, layout, is_captured(x), bias is None, matmul_precision(x.dtype)),
    )
    plan = _plans.get(key)
    if plan is None:
        order = layouts.order_of(layout, x.shape)
        rows = layouts.blocks(x.detach(), layout, weight.shape[0], weight.shape[2])
        p = problem_of(rows, weight, bias, activation, order, True)
        plan = _plans[key] = training_plan(select_pieces(p), activation, layout)
    return plan(x, weight, bias)


def _step(
    run: Callable[[Tensor, Tensor, Tensor | None, str, str], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    dy: Tensor,
    order: str,
) -> Results:
    x, weight = _in_layout(x, order).detach().requires_grad_(), weight.detach().requires_grad_()
    wanted = [x, weight]
    if bias is not None:
        bias = bias.detach().requires_grad_()
        wanted.append(bias)
    with torch.enable_grad():
        y = run(x, weight, bias, activation, LAYOUT_OF[order])
        dx, dw, *db = torch.autograd.grad(y, wanted, _in_layout(dy, order))
    return y.detach(), dx, dw, db[0] if db else None


def _in_layout(t: Tensor, order: str) -> Tensor:
    """t (B, L, G, features) as a user of ``LAYOUT_OF`` holds it."""
    axes = {"tokens": (0, 1, 2, 3), "groups": (2, 0, 1, 3), "channels": (0, 2, 3, 1)}
    return t.permute(axes[order])
