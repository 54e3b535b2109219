"""The passes between the products in C++ on a CPU; functions as in ``triton/passes.py``."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES
from fastlinear.core.problem import Problem
from fastlinear.families.experts.gate import Gate
from fastlinear.families.grouped.ragged.layout import with_rows
from fastlinear.fastpath import recorder
from fastlinear.kernels.cpu import allocator
from fastlinear.native import cpp_build

SOURCE = Path(__file__).with_name("experts.cpp")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INTEGERS = (
    *("slots", "top", "features", "hidden", "experts", "first", "kind", "weight_kind", "wide"),
    *("x_row", "row", "step", "act"),
)
_NUMBERS = ("limit", "alpha", "offset")


class _Call(ctypes.Structure):
    """The numbers of a call as ``experts.cpp`` reads them."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((name, ctypes.c_double) for name in _NUMBERS),
    )


def _call(**facts: Any) -> Any:
    return (_Call * 1)(_Call(**facts))  # ctypes passes arrays by address


def reason_not(problem: Problem) -> str | None:
    """Why the passes cannot serve a Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.dtype == "float64":
        return "float32, bfloat16 and float16 only, not float64"
    return cpp_build.reason_not() or cpp_build.failed(SOURCE)


def sort(index: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order (S,), place (S,), sizes (E,)), int32, of topk_index (T, k)."""
    index, slots = index.contiguous(), index.numel()
    order, place, sizes = (
        torch.empty(size, dtype=torch.int32, device=index.device)
        for size in (slots, slots, experts)
    )
    wide = index.dtype is torch.int64
    call = _call(slots=slots, experts=experts, first=first, wide=wide)
    recorder.run(_library().fastlinear_experts_sort, call, index, order, place, sizes)
    return order, place, sizes


def gather(x: Tensor, order: Tensor, top: int, weight: Tensor | None = None) -> Tensor:
    """The row of its token at each place, (S, H), dense; times its slot's weight where given."""
    x, slots, h = with_rows(x), order.shape[0], x.shape[1]
    out = allocator.empty((slots, h), x.dtype)
    call = _call(slots=slots, top=top, features=h, x_row=x.stride(0), **_kinds(x, weight))
    recorder.run(_library().fastlinear_experts_gather, call, x, order, weight, out)
    return out


def combine(rows: Tensor, place: Tensor, top: int, weight: Tensor | None = None) -> Tensor:
    """y (T, H): the rows of each token's slots, times their weights where given, in their order."""
    slots, h = rows.shape
    y = allocator.empty((slots // top, h), rows.dtype)
    call = _call(slots=slots, top=top, features=h, **_kinds(rows, weight))
    recorder.run(_library().fastlinear_experts_combine, call, rows, place, weight, y)
    return y


def gate_forward(pre: Tensor, gate: Gate) -> Tensor:
    """h (S, I), dense, of pre (S, 2I), dense."""
    slots, size = pre.shape[0], pre.shape[1] // 2
    h = allocator.empty((slots, size), pre.dtype)
    call = _call(slots=slots, hidden=size, **_kinds(pre), **_described(pre, gate))
    recorder.run(_library().fastlinear_experts_gate_forward, call, *gate.split(pre), h)
    return h


def gate_backward(
    dh: Tensor,
    pre: Tensor,
    gate: Gate,
    order: Tensor,
    index: Tensor,
    weight: Tensor,
    first: int,
    experts: int,
    dy: Tensor,
    bias: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dpre (S, 2I), w h (S, I), dweight (T, k)), each None where not needed, in one pass."""
    slots, size = dh.shape
    dpre = allocator.empty(pre.shape, pre.dtype) if needs[0] else None
    h = allocator.empty(dh.shape, dh.dtype) if needs[1] else None
    dweight = torch.empty_like(weight) if needs[2] else None
    call = _call(
        slots=slots,
        features=dy.shape[1],
        hidden=size,
        experts=experts,
        first=first,
        wide=index.dtype is torch.int64,
        **_kinds(dh, weight),
        **_described(pre, gate),
    )
    halves = (None, None) if dpre is None else gate.split(dpre)
    given = dh, *gate.split(pre), *halves, h, order, index, weight, dweight, dy, bias
    recorder.run(_library().fastlinear_experts_gate_backward, call, *given)
    return dpre, h, dweight


def _kinds(x: Tensor, weight: Tensor | None = None) -> dict[str, int]:
    return {"kind": _KINDS[x.dtype], "weight_kind": _KINDS[(x if weight is None else weight).dtype]}


def _described(pre: Tensor, gate: Gate) -> dict[str, Any]:
    return {
        "row": pre.shape[1],
        "step": 2 if gate.order == "interleaved" else 1,
        "act": CODES[gate.activation],
        "limit": gate.limit,
        "alpha": gate.alpha,
        "offset": gate.offset,
    }


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return cpp_build.load_calls(
        SOURCE,
        fastlinear_experts_sort=5,
        fastlinear_experts_gather=5,
        fastlinear_experts_combine=5,
        fastlinear_experts_gate_forward=4,
        fastlinear_experts_gate_backward=13,
    )
