"""The piece ``step`` of diagonal_linear: forward and backward, as autograd runs them.

``eager`` is PyTorch's own autograd, ``pieces`` our formula over the backends chosen for forward and
backward. What the host does for each is part of their time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.dispatch import cache
from fastlinear.ops.common import door_step
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.diagonal_linear import programs, reference
from fastlinear.ops.diagonal_linear.autograd import applied
from fastlinear.ops.diagonal_linear.plans import Plan, Training, training_of
from fastlinear.ops.diagonal_linear.problem import problem_of
from fastlinear.ops.diagonal_linear.selection import select_pieces

Results = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
_TABLE = "diagonal_linear.step"
_plans: dict[Any, tuple[Training, Plan]] = {}


def _forget() -> None:
    _plans.clear()
    door_step.clear(_TABLE)


cache.on_change(_forget)


def eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    dy: Tensor,
) -> Results:
    """(y, dx, dw, db, dr) by PyTorch's own autograd; x, residual and dy (M, K), weight (K,)."""
    return _step(reference.diagonal_linear, x, weight, bias, activation, residual, dy)


def pieces(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    dy: Tensor,
) -> Results:
    """(y, dx, dw, db, dr) by the formula over the chosen pieces, recorded as callers' calls are."""
    return _step(_by_pieces, x, weight, bias, activation, residual, dy)


def _by_pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    table = door_step.table(_TABLE, x.is_cuda)
    call = x, weight, (bias, residual), activation
    found: Tensor | None = None if table is None else table.call(*call)
    if found is not None:
        return found
    captured = is_captured(x)
    layout = None if residual is None else residual.stride()
    key = (x.shape, x.stride(), x.dtype, x.device, bias is None, layout, activation, captured)
    known = _plans.get(key)
    if known is None:
        p = problem_of(x, bias, residual, activation, True, captured)
        training = training_of(select_pieces(p), activation)
        known = _plans[key] = training, applied(training.formula)
    training, plan = known
    y = plan(x, weight, (bias, residual))
    if table is not None and table.wants(*call):
        made = programs.node(training, x, weight, bias, residual)
        if made is not None:
            table.admit(*call, made)
    return y


def _step(
    run: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    dy: Tensor,
) -> Results:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    residual = None if residual is None else residual.detach().requires_grad_()
    with torch.enable_grad():
        y = run(x, weight, bias, activation, residual)
        wanted = [t for t in (x, weight, bias, residual) if t is not None]
        grads = iter(torch.autograd.grad(y, wanted, dy))
    found = [None if t is None else next(grads) for t in (x, weight, bias, residual)]
    return (y.detach(), *found)  # type: ignore[return-value]
