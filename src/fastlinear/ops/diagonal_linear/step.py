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
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.diagonal_linear import reference
from fastlinear.ops.diagonal_linear.plans import Plan, training_plan
from fastlinear.ops.diagonal_linear.problem import problem_of
from fastlinear.ops.diagonal_linear.selection import select_pieces

Results = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
_plans: dict[Any, Plan] = {}
cache.on_change(_plans.clear)


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
    """(y, dx, dw, db, dr) by ``DiagonalLinear`` over the chosen pieces."""
    return _step(_by_pieces, x, weight, bias, activation, residual, dy)


def _by_pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    captured = is_captured(x)
    layout = None if residual is None else residual.stride()
    key = (x.shape, x.stride(), x.dtype, x.device, bias is None, layout, activation, captured)
    plan = _plans.get(key)
    if plan is None:
        p = problem_of(x, bias, residual, activation, True, captured)
        plan = _plans[key] = training_plan(select_pieces(p), activation)
    return plan(x, weight, (bias, residual))


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
