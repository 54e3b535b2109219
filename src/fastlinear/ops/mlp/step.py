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
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.mlp import reference
from fastlinear.ops.mlp.plans import Plan, training_plan
from fastlinear.ops.mlp.reference import Biases, Weights
from fastlinear.ops.mlp.selection import problem_of, select_pieces

Results = tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]
_plans: dict[Any, Plan] = {}
cache.on_change(_plans.clear)


def eager(
    x: Tensor, weights: Weights, biases: Biases, activation: str, final_activation: str, dy: Tensor
) -> Results:
    """(y, dx, dWs, dbs) by PyTorch's own autograd; x (M, n_0), dy (M, n_L)."""
    return _step(reference.mlp, x, weights, biases, activation, final_activation, dy)


def pieces(
    x: Tensor, weights: Weights, biases: Biases, activation: str, final_activation: str, dy: Tensor
) -> Results:
    """(y, dx, dWs, dbs) by ``Mlp`` over the chosen pieces."""
    return _step(_by_pieces, x, weights, biases, activation, final_activation, dy)


def _by_pieces(
    x: Tensor, weights: Weights, biases: Biases, activation: str, final_activation: str
) -> Tensor:
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
    plan = _plans.get(key)
    if plan is None:
        p = problem_of(x, weights, biases, activation, final_activation, False, True)
        plan = _plans[key] = training_plan(select_pieces(p), activation, final_activation)
    return plan(x, weights, biases)


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
