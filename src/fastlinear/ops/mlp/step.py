"""The piece ``step`` of mlp: forward and backward of a chain, as autograd runs them.

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
from fastlinear.ops.mlp import programs, reference
from fastlinear.ops.mlp.plans import Plan, training_of, training_plan
from fastlinear.ops.mlp.reference import Biases, Weights
from fastlinear.ops.mlp.selection import problem_of, select_pieces

Results = tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]
_TABLE = "mlp.step"
_plans: dict[Any, tuple[programs.Training, Plan]] = {}


def eager(
    x: Tensor, weights: Weights, biases: Biases, activation: str, final_activation: str, dy: Tensor
) -> Results:
    """(y, dx, dWs, dbs) by PyTorch's own autograd; x (M, n_0), dy (M, n_L)."""
    return _step(reference.mlp, x, weights, biases, activation, final_activation, dy)


def pieces(
    x: Tensor, weights: Weights, biases: Biases, activation: str, final_activation: str, dy: Tensor
) -> Results:
    """(y, dx, dWs, dbs) by the formula over the chosen pieces, recorded as callers' calls are."""
    return _step(_by_pieces, x, weights, biases, activation, final_activation, dy)


def _by_pieces(
    x: Tensor, weights: Weights, biases: Biases, activation: str, final_activation: str
) -> Tensor:
    table = door_step.table(_TABLE, x.is_cuda)
    call = x, weights, biases, activation, final_activation
    found = None if table is None else table.call(*call)
    if found is not None:
        return found  # type: ignore[no-any-return]
    key = (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        tuple([(w.shape, w.stride()) for w in weights]),
        tuple([b is None for b in biases]),
        activation,
        final_activation,
        is_captured(x),
        matmul_precision(x.dtype),
    )
    known = _plans.get(key)
    if known is None:
        p = problem_of(x, weights, biases, activation, final_activation, True)
        training = training_of(select_pieces(p), activation, final_activation)
        known = _plans[key] = training, training_plan(training)
    training, plan = known
    y = plan(x, weights, biases)
    if table is not None and table.wants(*call):
        node = programs.node(training, x, weights, biases)
        if node is not None:
            table.admit(*call, node)
    return y


def _forget() -> None:
    _plans.clear()
    door_step.clear(_TABLE)


cache.on_change(_forget)


def _step(
    run: Callable[[Tensor, Weights, Biases, str, str], Tensor],
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    dy: Tensor,
) -> Results:
    x = x.detach().requires_grad_()
    weights = tuple([w.detach().requires_grad_() for w in weights])
    biases = tuple([None if b is None else b.detach().requires_grad_() for b in biases])
    with torch.enable_grad():
        y = run(x, weights, biases, activation, final_activation)
        wanted = [x, *weights, *[b for b in biases if b is not None]]
        dx, *rest = torch.autograd.grad(y, wanted, dy)
    dbs = iter(rest[len(weights) :])
    return (
        y.detach(),
        dx,
        tuple(rest[: len(weights)]),
        tuple(None if b is None else next(dbs) for b in biases),
    )
