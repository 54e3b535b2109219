"""Second and third derivatives of layers: when passes of our own pay, and products that are
differentiated by products.

Each of a layer's three products is differentiated by the other two, so derivatives of any order
take linear_act's backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastlinear.core import calls
from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family, is_installed
from fastlinear.dispatch.prices import prices
from fastlinear.dispatch.select import BASELINE, predictions, select
from fastlinear.dispatch.work import ANY, HOST, dtype_of, host
from fastlinear.families.linear import problem as posed
from fastlinear.families.linear.selection import problem_of
from fastlinear.op.differentiable import Multiply, by_torch, in_memory

_Run = Callable[[Tensor, Tensor], Tensor]
_PASSES = 3  # of PyTorch's, at least, that one of ours stands for
_OPERANDS = 2  # times as many as one of PyTorch's reads and writes, at most
_LAUNCHED = 2  # nodes' worth of Python, with a product's launches on a GPU


def passes_pay(t: Tensor, activation: str) -> bool:
    """Whether derivatives of an activation on such (M, N) take less by our passes than by PyTorch's
    ops: one of ours stands for three at least, and its node is in Python."""
    if t.dtype not in DTYPE_NAMES or t.device.type not in ("cpu", "cuda") or not t.numel():
        return False
    return _passes_pay(*t.shape, activation, t.dtype, t.device.type, calls.is_captured(t))


@lru_cache(maxsize=1024)
def _passes_pay(
    m: int, n: int, activation: str, dtype: torch.dtype, device: str, captured: bool
) -> bool:
    p = posed.problem(
        *("grad_pre", m, 1, n),
        dtype=DTYPE_NAMES[dtype],
        device=device,
        activation=activation,
        bias=False,
        captured=captured,
    )
    known, works = prices(device), family(posed.NAME).work_of(p, BASELINE) or ()
    of_device = [w for w in works if not w.kind.endswith(HOST)]
    a_pass = None if known is None else known.predict(of_device, dtype_of(p))
    if a_pass is None or not a_pass.us:
        return False
    return _with_nodes(p, _OPERANDS * a_pass.us, 1) < _PASSES * a_pass.us


def _with_nodes(p: Problem, us: float, nodes: int) -> float:
    """What takes ``us`` with what the host pays for nodes in Python: a GPU computes meanwhile, and
    replays without."""
    if p.captured:
        return us
    cuda, kind = p.device == "cuda", "node" if p.device == "cuda" else "autograd"
    known, own = prices(p.device), (host(f"{posed.NAME} {kind}", nodes),)
    told = None if known is None else known.predict(own, ANY if cuda else p.dtype)
    by_host = float("inf") if told is None else told.us
    return max(us, by_host) if cuda else us + by_host


def product(piece: str, a: Tensor, b: Tensor) -> Tensor:
    """``by_torch``'s product, differentiable to any order, by the backend that linear_act takes.

    Args:
        piece: ``"forward"`` for a (M, K) and b (N, K), ``"grad_input"`` for (M, N) and (N, K), or
            ``"grad_weight"`` for (M, N) and (M, K).
    """
    served = a.device.type in ("cpu", "cuda") and a.numel() and b.numel() and in_memory(a, b)
    if not served or a.dtype not in DTYPE_NAMES:
        return by_torch(piece, a, b)
    a = a.contiguous()
    kinds = (a.shape, b.shape, b.stride(), a.dtype, a.device.type)
    run = _chosen(piece, *kinds, matmul_precision(a.dtype), calls.is_captured(a))
    if run is None:
        return by_torch(piece, a, b)
    y: Tensor = _Product.apply(piece, run, a, b)
    return y


@lru_cache(maxsize=1024)
def _chosen(
    piece: str,
    a_shape: tuple[int, int],
    b_shape: tuple[int, int],
    b_stride: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    precision: str,
    captured: bool,
) -> _Run | None:
    """The backend of a product; None where PyTorch's is as fast with its shorter way."""
    a = torch.empty(a_shape, dtype=dtype, device="meta")
    b = torch.empty_strided(b_shape, b_stride, dtype=dtype, device="meta")
    if piece == "forward":
        x, weight = a, b
    elif piece == "grad_input":
        x, weight = a.new_empty(a_shape[0], b_shape[1]), b
    else:
        x, weight = b, a.new_empty(a_shape[1], b_shape[1])
    p = problem_of(x, weight, None, "none", piece != "forward", captured).with_piece(piece)
    p = replace(p, device=device, precision=precision)
    chosen = select(p)
    able = [b for b in family(p.family).candidates(piece) if b.reason_not(p) is None]
    told = predictions(p, able)
    if chosen.backend.name == BASELINE or not {BASELINE, chosen.backend.name} <= told.keys():
        return None
    nodes = _LAUNCHED if device == "cuda" else 1
    if _with_nodes(p, told[chosen.backend.name].us, nodes) >= told[BASELINE].us:
        return None
    run = chosen.load()
    if piece == "forward":
        return lambda a, b: run(a, b, None, "none", False)[0]  # type: ignore[no-any-return]
    return run


cache.on_change(_passes_pay.cache_clear)
cache.on_change(_chosen.cache_clear)


def bias_gradient(dpre: Tensor) -> Tensor:
    """Column sums of dpre (M, N), differentiable; where no graph of them is wanted, by a pass of
    ours on a GPU."""
    plain = dpre.is_cuda and not torch.is_grad_enabled() and dpre.numel() and in_memory(dpre)
    if not plain or dpre.dtype not in DTYPE_NAMES or not is_installed("triton"):
        return dpre.sum(0)
    from fastlinear.families.linear.triton import backend

    db = backend.grad_pre(dpre, None, "none", True)[1]
    assert db is not None
    return db


OURS = Multiply(product, bias_gradient)


class _Product(torch.autograd.Function):
    """One of the three products; its gradients are the other two."""

    @staticmethod
    def forward(ctx: Any, piece: str, run: _Run, a: Tensor, b: Tensor) -> Tensor:
        """``run``'s."""
        ctx.save_for_backward(a, b)
        ctx.piece = piece
        return run(a, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(None, None, the gradients of a and b)."""
        a, b = ctx.saved_tensors
        need_a, need_b = calls.wanted(ctx)[2:]
        by_a, by_b = {
            "forward": (("grad_input", dy, b), ("grad_weight", dy, a)),
            "grad_input": (("forward", dy, b), ("grad_weight", a, dy)),
            "grad_weight": (("forward", b, dy), ("grad_input", a, dy)),
        }[ctx.piece]
        return None, None, product(*by_a) if need_a else None, product(*by_b) if need_b else None
