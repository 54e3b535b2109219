"""The pieces ``step`` and ``backward`` as made of the other pieces.

``step`` is forward and backward of one layer, as autograd runs them.

Its two backends are ``eager`` (PyTorch's own autograd) and ``pieces`` (our formula over the
backends chosen for the other pieces). What the host does for each is part of their time, which
decides for small layers on a GPU and tiny ones on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.dispatch import cache
from fastlinear.dispatch.select import select
from fastlinear.ops.common import door_step
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.linear_act import programs, reference
from fastlinear.ops.linear_act.autograd import Backward, applied, backward_from
from fastlinear.ops.linear_act.plans import Plan, Training, as_memory_lies, training_of
from fastlinear.ops.linear_act.problem import BACKWARD_PIECES
from fastlinear.ops.linear_act.selection import problem_of, select_pieces

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]
_TABLE = "linear_act.step"
_plans: dict[Any, tuple[Training, Plan]] = {}
_backwards: dict[Any, Backward] = {}


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dy: Tensor) -> Grads:
    """(y, dx, dW, db) by PyTorch's own autograd; x (M, K), weight (N, K), dy (M, N)."""
    return _step(reference.linear_act, x, weight, bias, activation, dy)


def pieces(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dy: Tensor) -> Grads:
    """(y, dx, dW, db) by the formula over the chosen pieces, recorded as callers' calls are."""
    return _step(_by_pieces, x, weight, bias, activation, dy)


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dW, db) by the backends chosen for the pieces of the backward, one after the other."""
    captured = is_captured(x)
    layouts = (x.shape, weight.shape, x.dtype, x.device, x.stride(), weight.stride())
    key = (*layouts, activation, captured, needs[2])
    run = _backwards.get(key)
    if run is None:
        bias = weight.new_empty(weight.shape[0]) if needs[2] else None
        p = problem_of(x, weight, bias, activation, True, captured)
        pieces = (select(p.with_piece(piece)) for piece in BACKWARD_PIECES)
        run = _backwards[key] = backward_from(*(c.backend.load() for c in pieces))
    return run(dy, saved, x, weight, activation, needs)


def _by_pieces(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    table = door_step.table(_TABLE, x.is_cuda)
    found = None if table is None else table.call(x, weight, bias, activation)
    if found is not None:
        return found  # type: ignore[no-any-return]
    captured = is_captured(x)
    key = (
        x.shape,
        weight.shape,
        x.dtype,
        x.device,
        x.stride(),
        weight.stride(),
        activation,
        captured,
        bias is None,
    )
    known = _plans.get(key)
    if known is None:
        p = problem_of(x, weight, bias, activation, True, captured)
        training = training_of(select_pieces(p), activation)
        known = _plans[key] = training, applied(training.formula)
    training, plan = known
    y = plan(x, weight, bias)
    given = x, weight, bias
    if table is not None and as_memory_lies(*given) and table.wants(*given, activation):
        node = programs.node(training, *given)
        if node is not None:
            table.admit(*given, activation, node)
    return y


def _forget() -> None:
    _plans.clear()
    _backwards.clear()
    door_step.clear(_TABLE)


cache.on_change(_forget)


def _step(
    run: Callable[[Tensor, Tensor, Tensor | None, str], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    dy: Tensor,
) -> Grads:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    wanted = [x, weight]
    if bias is not None:
        bias = bias.detach().requires_grad_()
        wanted.append(bias)
    with torch.enable_grad():
        y = run(x, weight, bias, activation)
        dx, dw, *db = torch.autograd.grad(y, wanted, dy)
    return y.detach(), dx, dw, db[0] if db else None
