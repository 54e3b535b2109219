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
from fastlinear.ops.common import door_step
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import programs, reference
from fastlinear.ops.grouped_linear.autograd import Formula
from fastlinear.ops.grouped_linear.plans import Plan, formula_of, training_plan
from fastlinear.ops.grouped_linear.selection import problem_of, select_pieces

Results = tuple[Tensor, Tensor, Tensor, Tensor | None]
LAYOUT_OF = {"tokens": "... g k", "groups": "g ... k", "channels": "b g k ..."}
"""Order of memory → a layout of users in which tensors lie so."""

_TABLE = "grouped_linear.step"
_plans: dict[Any, tuple[Formula, Plan]] = {}


def _forget() -> None:
    _plans.clear()
    door_step.clear(_TABLE)


cache.on_change(_forget)


def eager(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dy: Tensor, order: str
) -> Results:
    """(y, dx, dW, db) by PyTorch's own autograd; x (B, L, G, K), dy (B, L, G, N), dense."""
    return _step(reference.grouped_linear, x, weight, bias, activation, dy, order)


def pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dy: Tensor, order: str
) -> Results:
    """(y, dx, dW, db) by the formula over the chosen pieces, recorded as callers' calls are."""
    return _step(_by_pieces, x, weight, bias, activation, dy, order)


def _by_pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layout: str
) -> Tensor:
    table = door_step.table(_TABLE, x.is_cuda)
    call = x, weight, bias, activation, layout
    found: Tensor | None = None if table is None else table.call(*call)
    if found is not None:
        return found
    key = (
        *(x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, x.device),
        *(activation, layout, is_captured(x), bias is None, matmul_precision(x.dtype)),
    )
    known = _plans.get(key)
    if known is None:
        order = layouts.order_of(layout, x.shape)
        rows = layouts.blocks(x.detach(), layout, weight.shape[0], weight.shape[2])
        p = problem_of(rows, weight, bias, activation, order, True)
        formula = formula_of(select_pieces(p), rows, weight, activation, layout)
        known = _plans[key] = formula, training_plan(formula)
    formula, plan = known
    y = plan(x, weight, bias)
    if table is not None and table.wants(*call):
        made = programs.node(formula, x, weight, bias)
        if made is not None:
            table.admit(*call, made)
    return y


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
