"""Backend ``padded``: tokens and weights whose numbers lie badly, copied to where they lie well.

No kernel can load 16 bytes at once of rows of odd lengths, of every second number, or of features
that lie a length apart: all run below their rate then. Copies are dense, with zeros behind K up to
a multiple of 16; what dispatch chooses for such groups multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.calls import is_captured
from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import is_installed
from fastlinear.dispatch.select import select
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.problem import inner_order, padded_size, problem
from fastlinear.families.grouped.reference import Gradients, Needs

_MOST_CHOSEN = 4096
_chosen: dict[Any, Callable[..., Any]] = {}
cache.on_change(_chosen.clear)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (B, L, G, K), weight (G, N, K), bias (G, N) → y (B, L, G, N), pre if asked."""
    inner, wide = inner_order(order), padded_size(x.shape[3])
    run = _run("forward", x, weight, activation, bias is not None, save_pre, inner)
    y, pre = run(_rows(x, inner, wide), _wide(weight, wide), bias, activation, save_pre, inner)
    return _placed(y, order, x), None if pre is None else _placed(pre, order, x)


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
) -> Gradients:
    """(dx, dW, db), each None where not needed; dx lies in ``order``, dW and db are contiguous."""
    inner, k, n = inner_order(order), x.shape[3], weight.shape[1]
    wide = padded_size(k)
    run = _run("backward", x, weight, activation, needs[2], True, inner)
    kept = None if saved is None else _rows(saved, inner, n)
    rows, weights = _rows(x, inner, wide), _wide(weight, wide)
    dx, dw, db = run(_rows(dy, inner, n), kept, rows, weights, activation, needs, inner)
    dx = None if dx is None else _placed(dx[..., :k], order, x)
    return dx, None if dw is None else _cut(dw, k), db


def _rows(t: Tensor, order: str, features: int) -> Tensor:
    """t (B, L, G, D) as (1, B·L, G, features), dense in that order, zeros behind D."""
    batch, length, groups, d = t.shape
    if d == features and batch == 1 and layouts.is_dense(t, order):
        return t
    made = layouts.empty((1, batch * length, groups, features), order, t, t.dtype)
    _copy(t, made[0].unflatten(0, (batch, length)))
    return made


def _wide(weight: Tensor, features: int) -> Tensor:
    """A weight (G, N, K), dense, with zeros behind K."""
    groups, n, k = weight.shape
    if k == features and weight.is_contiguous():
        return weight
    made = weight.new_empty(groups, n, features)
    _copy(weight.unsqueeze(2), made.unsqueeze(2))
    return made


def _cut(weight: Tensor, k: int) -> Tensor:
    """The first K features of a dense (G, N, features), dense."""
    groups, n, features = weight.shape
    if k == features:
        return weight
    made = weight.new_empty(groups, n, k)
    _copy(weight[..., :k].unsqueeze(2), made.unsqueeze(2))
    return made


def _placed(t: Tensor, order: str, x: Tensor) -> Tensor:
    """t (1, B·L, G, D) as (B, L, G, D) of x's tokens, dense in that order."""
    placed = t[0].unflatten(0, x.shape[:2])
    if layouts.is_dense(placed, order):
        return placed
    made = layouts.empty(placed.shape, order, t, t.dtype)
    _copy(placed, made)
    return made


def _copy(t: Tensor, out: Tensor) -> None:
    """Write t (B, L, G, D) to ``out`` (B, L, G, E), and zeros behind D."""
    if t.is_cuda and is_installed("triton"):
        from fastlinear.families.grouped.triton.copies import copy_tokens

        return copy_tokens(t, out)
    d = t.shape[3]
    out[..., :d].copy_(t)
    if d < out.shape[3]:
        out[..., d:].zero_()
    return None


def _run(
    piece: str, x: Tensor, weight: Tensor, activation: str, bias: bool, grad: bool, order: str
) -> Callable[..., Any]:
    """What dispatch takes for the copies."""
    (batch, length, groups, k), n = x.shape, weight.shape[1]
    regime = is_captured(x), matmul_precision(x.dtype)
    key = (piece, *x.shape, n, x.dtype, x.device, activation, bias, grad, order, *regime)
    run = _chosen.get(key)
    if run is None:
        if len(_chosen) >= _MOST_CHOSEN:
            _chosen.clear()
        p = problem(
            *(piece, batch * length, groups, padded_size(k), n),
            dtype=DTYPE_NAMES[x.dtype],
            device=x.device.type,
            activation=activation,
            bias=bias,
            needs_grad=grad,
            order=order,
            precision=regime[1],
            captured=regime[0],
        )
        with torch.cuda.device(x.device if x.is_cuda else -1):
            run = _chosen[key] = select(p).load()
    return run
