"""Backend ``padded``: rows that do not begin at multiples of 16 elements, copied to where they do.

Products of such rows run many times below their rate, PyTorch's as well as ours: neither can load
16 bytes at once. Zeros fill the copies up to multiples of 16 features, the product of aligned rows
is the one that dispatch chooses for them, and what the zeros add is cut off. A copy reads and
writes its tensor once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.select import select
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.linear_act.backends import problem
from fastlinear.ops.linear_act.padded_problem import MULTIPLE, padded_size

_MOST_CHOSEN = 4096
_chosen: dict[Any, Callable[..., Any]] = {}
cache.on_change(_chosen.clear)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (M, K), weight (N, K), bias (N,) → y (M, N) and, if asked, pre (M, N)."""
    n = weight.shape[0]
    rows, turned = _columns(x), _both(weight)
    wide = bias
    if bias is not None and n % MULTIPLE:
        wide = bias.new_zeros(turned.shape[0])
        wide[:n].copy_(bias)
    run = _run("forward", x, weight, activation, bias is not None, save_pre)
    y, pre = run(rows, turned, wide, activation, save_pre)
    return _cut(y, n), None if pre is None else _cut(pre, n)


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) @ weight (N, K)."""
    run = _run("grad_input", dpre, weight, "none", True, True)
    dx: Tensor = run(_columns(dpre), _both(weight))
    return _cut(dx, weight.shape[1])


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) @ x (M, K)."""
    run = _run("grad_weight", dpre, x, "none", True, True)
    dw: Tensor = run(_columns(dpre), _columns(x))
    n, k = dpre.shape[1], x.shape[1]
    return dw if dw.shape == (n, k) else dw[:n, :k].contiguous()


def _columns(t: Tensor) -> Tensor:
    """t (M, K) with zeros in columns K … up to a multiple, dense."""
    m, k = t.shape
    if k % MULTIPLE == 0:
        return t.contiguous()
    wide = t.new_empty(m, padded_size(k))
    wide[:, :k].copy_(t)
    wide[:, k:].zero_()
    return wide


def _both(weight: Tensor) -> Tensor:
    """The weight (N, K) with zeros in rows and columns up to multiples, dense."""
    n, k = weight.shape
    if n % MULTIPLE == 0:
        return _columns(weight)
    wide = weight.new_empty(padded_size(n), padded_size(k))
    wide[:n, :k].copy_(weight)
    wide[:n, k:].zero_()
    wide[n:].zero_()
    return wide


def _cut(t: Tensor, n: int) -> Tensor:
    return t if t.shape[1] == n else t[:, :n].contiguous()


def _run(
    piece: str, a: Tensor, b: Tensor, activation: str, bias: bool, needs_grad: bool
) -> Callable[..., Any]:
    """What dispatch takes for the aligned product."""
    captured = is_captured(a)
    precision = matmul_precision(a.dtype)
    key = (piece, a.shape, b.shape, a.dtype, a.device, activation, bias, needs_grad)
    run = _chosen.get((key, captured, precision))
    if run is None:
        if len(_chosen) >= _MOST_CHOSEN:
            _chosen.clear()
        with torch.cuda.device(a.device if a.is_cuda else -1):
            p = _aligned(piece, a, b, activation, bias, needs_grad, captured, precision)
            run = _chosen[key, captured, precision] = select(p).backend.load()
    return run


def _aligned(
    piece: str,
    a: Tensor,
    b: Tensor,
    activation: str,
    bias: bool,
    needs_grad: bool,
    captured: bool,
    precision: str,
) -> Problem:
    m = a.shape[0]
    n, k = (a.shape[1], b.shape[1]) if piece == "grad_weight" else b.shape
    return problem(
        piece,
        m,
        padded_size(k),
        padded_size(n),
        dtype=DTYPE_NAMES[a.dtype],
        device=a.device.type,
        activation=activation,
        bias=bias,
        needs_grad=needs_grad,
        precision=precision,
        captured=captured,
    )
