"""Backend ``padded``: rows that do not begin at multiples of 16 bytes, copied to where they do.

Products of such rows, or of numbers that lie in no rows, run many times below their rate, PyTorch's
as well as ours: neither can load 16 bytes at once. Zeros fill the copies up to multiples of 16
features. The backward's first copy is the pre-activation's gradient, written where it is worked
out. On Hopper, in 16 bits, results of odd rows are written as such by ``cuda``'s product. Any other
product of aligned rows is the one that dispatch chooses for them, and what the zeros add is cut
off. A copy reads and writes its tensor once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.calls import is_captured
from fastlinear.core.device import device_facts
from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import is_installed
from fastlinear.dispatch.select import select
from fastlinear.families.linear import reference
from fastlinear.families.linear.cuda import gemm
from fastlinear.families.linear.padded_problem import MULTIPLE, padded_size
from fastlinear.families.linear.problem import problem

_MOST_CHOSEN = 4096
_chosen: dict[Any, Callable[..., Any]] = {}
cache.on_change(_chosen.clear)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (M, K), weight (N, K), bias (N,) → y (M, N) and, if asked, pre (M, N)."""
    n, k = weight.shape
    if _writes_odd_rows(x) and (n % MULTIPLE or _lies_turned(weight)):
        return gemm.forward(
            aligned_copy(x)[:, :k], aligned_copy(weight)[:, :k], bias, activation, save_pre
        )
    rows, wide_weight, wide = aligned_copy(x), _wide(weight), bias
    if bias is not None and n % MULTIPLE:
        wide = aligned_copy(bias[None])[0]
    run = _run("forward", x, weight, activation, bias is not None, save_pre)
    y, pre = run(rows, wide_weight, wide, activation, save_pre)
    return _cut(y, n), None if pre is None else _cut(pre, n)


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) @ weight (N, K)."""
    return _grad_input(aligned_copy(dpre), dpre, weight)


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) @ x (M, K)."""
    return _grad_weight(aligned_copy(dpre), dpre, x)


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dW, db), each None where not wanted; as ``step.backward``, with one copy of dpre."""
    if activation == "none" and not needs[2]:
        wide, db = aligned_copy(dy) if any(needs[:2]) else None, None
    elif _has_kernels(dy) and dy.numel():
        from fastlinear.families.linear.triton import backend

        wide, db = backend.wide_grad_pre(
            dy, saved, activation, needs[2], padded_size(dy.shape[1]), any(needs[:2])
        )
    else:
        dpre, db = reference.grad_pre(dy, saved, activation, needs[2])
        wide = aligned_copy(dpre) if any(needs[:2]) else None
    if wide is None:
        return None, None, db
    dx = _grad_input(wide, dy, weight) if needs[0] else None
    dw = _grad_weight(wide, dy, x) if needs[1] else None
    return dx, dw, db


def _grad_input(wide: Tensor, dpre: Tensor, weight: Tensor) -> Tensor:
    """dx of dpre, which ``wide`` is a padded copy of; of dpre itself only the kind is read."""
    n, k = weight.shape
    if _writes_odd_rows(dpre) and (k % MULTIPLE or _lies_turned(weight)):
        dx, _ = gemm.gemm(wide[:, :n], aligned_copy(weight)[:, :k].t())
        return dx
    run = _run("grad_input", dpre, weight, "none", True, True)
    return _cut(run(wide, _wide(weight)), k)


def _wide(weight: Tensor) -> Tensor:
    """A weight with zeros up to multiples both ways, in rows or in columns as it lies."""
    n, k = weight.shape
    if _lies_turned(weight):
        return aligned_copy(weight.t(), padded_size(k)).t()
    return aligned_copy(weight, padded_size(n))


def _lies_turned(weight: Tensor) -> bool:
    return weight.stride(0) == 1 < weight.stride(1)


def _grad_weight(wide: Tensor, dpre: Tensor, x: Tensor) -> Tensor:
    n, k = dpre.shape[1], x.shape[1]
    if _writes_odd_rows(dpre) and (n % MULTIPLE or k % MULTIPLE):
        dw, _ = gemm.gemm(wide[:, :n].t(), aligned_copy(x)[:, :k].t())
        return dw
    run = _run("grad_weight", dpre, x, "none", True, True)
    return _cut(run(wide, aligned_copy(x)), k, n)


def _writes_odd_rows(t: Tensor) -> bool:
    """Whether products of such a tensor are ``cuda``'s."""
    return (
        t.is_cuda
        and t.numel() > 0
        and t.dtype in (torch.bfloat16, torch.float16)
        and device_facts(t.device).capability == (9, 0)
    )


def _has_kernels(t: Tensor) -> bool:
    return t.is_cuda and is_installed("triton")


def aligned_copy(t: Tensor, rows: int | None = None) -> Tensor:
    """t (M, K) with zeros in columns K … up to a multiple and in rows M … ``rows``, dense; t itself
    where nothing is to be added and rows lie well."""
    m, k = t.shape
    rows, columns = rows or m, padded_size(k)
    apart = t.stride(1) == 1 and t.stride(0) > k and t.stride(0) % MULTIPLE == 0
    if (rows, columns) == (m, k) and (apart or t.is_contiguous()):
        return t
    if _has_kernels(t) and t.stride(1) == 1:
        from fastlinear.families.linear.triton import backend

        return backend.copy_rows(t, rows, columns)
    if _has_kernels(t) and t.stride(0) == 1 and rows == m:
        from fastlinear.families.linear.triton import backend

        return backend.copy_turned(t, columns)
    if (rows, columns) == (m, k):
        return t.contiguous()
    wide = t.new_empty(rows, columns)
    wide[:m, :k].copy_(t)
    wide[:m, k:].zero_()
    wide[m:].zero_()
    return wide


def _cut(t: Tensor, n: int, m: int | None = None) -> Tensor:
    """The first n columns of m rows, dense."""
    m = m or t.shape[0]
    if t.shape == (m, n):
        return t
    if _has_kernels(t) and t.stride(1) == 1:
        from fastlinear.families.linear.triton import backend

        return backend.copy_rows(t[:m, :n], m, n)
    return t[:m, :n].contiguous()


def _run(
    piece: str, a: Tensor, b: Tensor, activation: str, bias: bool, needs_grad: bool
) -> Callable[..., Any]:
    """What dispatch takes for the aligned product."""
    captured = is_captured(a)
    precision = matmul_precision(a.dtype)
    w = "kn" if piece != "grad_weight" and _lies_turned(b) else "nk"
    key = (piece, a.shape, b.shape, a.dtype, a.device, activation, bias, needs_grad, w)
    run = _chosen.get((key, captured, precision))
    if run is None:
        if len(_chosen) >= _MOST_CHOSEN:
            _chosen.clear()
        with torch.cuda.device(a.device if a.is_cuda else -1):
            p = _aligned(piece, a, b, activation, bias, needs_grad, w, captured, precision)
            run = _chosen[key, captured, precision] = select(p).load()
    return run


def _aligned(
    piece: str,
    a: Tensor,
    b: Tensor,
    activation: str,
    bias: bool,
    needs_grad: bool,
    w_layout: str,
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
        w_layout=w_layout,
        precision=precision,
        captured=captured,
    )
