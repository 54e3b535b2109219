"""The piece ``step`` of gated_mlp: forward and backward of one call, as autograd runs them.

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
from fastlinear.ops.gated_mlp import reference
from fastlinear.ops.gated_mlp.autograd import Formula
from fastlinear.ops.gated_mlp.plans import Plan, formula_of, training_plan
from fastlinear.ops.gated_mlp.programs import node
from fastlinear.ops.gated_mlp.selection import problem_of, select_pieces
from fastlinear.ops.gated_mlp.stacking import Biases, Weights

_TABLE = "gated_mlp.step"
_plans: dict[Any, tuple[Formula, Plan]] = {}

Results = tuple[Tensor | None, ...]


def eager(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, dy: Tensor
) -> Results:
    """(y, then seven gradients) by PyTorch's own autograd; x (M, K), dy of y's shape."""

    def run(x: Tensor, weights: Weights, biases: Biases) -> Tensor:
        return reference.gated_mlp(x, weights, biases, activation, order)

    return _step(run, x, weights, biases, dy)


def pieces(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, dy: Tensor
) -> Results:
    """The same by the formula over the chosen pieces, recorded as callers' calls are."""

    def run(x: Tensor, weights: Weights, biases: Biases) -> Tensor:
        return _by_pieces(x, weights, biases, activation, order)

    return _step(run, x, weights, biases, dy)


def _by_pieces(x: Tensor, weights: Weights, biases: Biases, activation: str, order: str) -> Tensor:
    table = door_step.table(_TABLE, x.is_cuda)
    call = x, weights[:], biases[:], activation, order
    found = None if table is None else table.call(*call)
    if found is not None:
        return found  # type: ignore[no-any-return]
    key = (
        *((t.shape, t.stride()) for t in (x, *weights) if t is not None),
        *(b is None for b in biases),
        *(x.dtype, x.device, activation, order, is_captured(x), matmul_precision(x.dtype)),
    )
    known = _plans.get(key)
    if known is None:
        p = problem_of(x, weights, biases, activation, order, None, True)
        formula = formula_of(select_pieces(p), activation, order)
        known = _plans[key] = formula, training_plan(formula)
    formula, plan = known
    y = plan(x, weights, biases)
    if table is not None and table.wants(*call):
        made = node(formula, x, weights, biases)
        if made is not None:
            table.admit(*call, made)
    return y


def _forget() -> None:
    _plans.clear()
    door_step.clear(_TABLE)


cache.on_change(_forget)


def _step(
    run: Callable[[Tensor, Weights, Biases], Tensor],
    x: Tensor,
    weights: Weights,
    biases: Biases,
    dy: Tensor,
) -> Results:
    given = [None if t is None else t.detach().requires_grad_() for t in (x, *weights, *biases)]
    own: Any = given
    with torch.enable_grad():
        y = run(own[0], Weights(*own[1:4]), Biases(*own[4:7]))
        grads = iter(torch.autograd.grad(y, [t for t in given if t is not None], dy))
    return y.detach(), *(None if t is None else next(grads) for t in given)
