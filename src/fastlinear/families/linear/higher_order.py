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
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.prices import prices
from fastlinear.dispatch.select import BASELINE, predictions, select
from fastlinear.dispatch.work import ANY, HOST, dtype_of, host
from fastlinear.families.linear import problem as posed
from fastlinear.families.linear.selection import problem_of
from fastlinear.op.differentiable import by_torch, in_memory

_Run = Callable[[Tensor, Tensor], Tensor]


@lru_cache(maxsize=1024)
def passes_pay(m: int, n: int, activation: str, dtype: torch.dtype, device: str) -> bool:
    """Whether one of PyTorch's passes over (m, n) takes longer than a node in Python: ours save
    two or more of them for each node that they add."""
    known = prices(device) if device in ("cpu", "cuda") else None
    if known is None or not m or not n:
        return False
    name = DTYPE_NAMES[dtype]
    p = posed.problem(
        *("grad_pre", m, 1, n), dtype=name, device=device, activation=activation, bias=False
    )
    works = family(posed.NAME).work_of(p, BASELINE) or ()
    a_pass = known.predict([w for w in works if not w.kind.endswith(HOST)], dtype_of(p))
    return a_pass is not None and a_pass.us > _node_us(p)


def _node_us(p: Problem) -> float:
    """What the host pays for a node in Python."""
    known = prices(p.device)
    dtype = ANY if p.device == "cuda" else p.dtype
    told = known.predict((host(f"{posed.NAME} autograd"),), dtype) if known is not None else None
    return float("inf") if told is None else told.us


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
    if told[BASELINE].us - told[chosen.backend.name].us <= _node_us(p):
        return None
    run = chosen.load()
    if piece == "forward":
        return lambda a, b: run(a, b, None, "none", False)[0]  # type: ignore[no-any-return]
    return run


cache.on_change(passes_pay.cache_clear)
cache.on_change(_chosen.cache_clear)


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
