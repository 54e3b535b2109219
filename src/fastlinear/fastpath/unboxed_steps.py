"""PyTorch's ops that have a step of their own, which a tape runs without boxing its arguments.

Functions take the recording and all arguments of the op's schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.fastpath.aten_results import facts_of

_Special = Callable[[Any, tuple[Any, ...]], "list[Any] | None"]


def _linear(r: Any, arguments: tuple[Any, ...]) -> list[Any]:
    x, weight, bias = arguments
    return ["linear", None, r.at(x), r.at(weight), -1 if bias is None else r.at(bias)]


def _turned(r: Any, t: Tensor) -> tuple[int, int]:
    """A matrix as (a tensor's number, whether it is read transposed)."""
    known = r.home(t).views
    if facts_of(t) not in known and t.dim() == 2 and facts_of(t.t()) in known:
        return known[facts_of(t.t())], 1
    return r.at(t), 0


def _mm(r: Any, arguments: tuple[Any, ...]) -> list[Any]:
    a, b = arguments[:2]
    return ["mm", None, *_turned(r, a), *_turned(r, b)]


def _bmm(r: Any, arguments: tuple[Any, ...]) -> list[Any]:
    return ["bmm", None, *map(r.at, arguments[:2])]


def _sum(r: Any, arguments: tuple[Any, ...]) -> list[Any] | None:
    t, dims, keep, dtype = arguments
    if keep or dtype is not None or not dims:
        return None
    return ["sum", None, r.at(t), tuple(d % t.dim() for d in dims)]


def _clone(r: Any, arguments: tuple[Any, ...]) -> list[Any] | None:
    t, memory_format = arguments
    dense = memory_format in (0, torch.contiguous_format) and not t.is_contiguous()
    return ["dense", None, r.at(t)] if dense else None


def _grouped_mm(r: Any, arguments: tuple[Any, ...]) -> None:
    """No step of its own; its kernels are chosen by alignment."""
    for t in arguments[:2]:
        r.only_as_aligned(t)


def _onednn(r: Any, arguments: tuple[Any, ...]) -> list[Any] | None:
    x, weight, bias, name, scalars, algorithm = arguments
    if name != "none" or scalars or algorithm:
        return None
    last = -1 if bias is None else r.at(bias)
    return ["onednn", None, *_turned(r, x), *_turned(r, weight), last]


STEPS: dict[str, _Special] = {
    "aten.linear.default": _linear,
    "aten.mm.default": _mm,
    "aten.matmul.default": _mm,
    "aten.bmm.default": _bmm,
    "aten.sum.dim_IntList": _sum,
    "aten.clone.default": _clone,
    "aten._grouped_mm.default": _grouped_mm,
    "mkldnn._linear_pointwise.default": _onednn,
}


def _addmm(r: Any, arguments: tuple[Any, ...], target: Tensor) -> bool:
    _, a, b, beta, alpha = arguments
    if (beta, alpha) != (1, 1):
        return False
    r.steps.append(["addmm" if a.dim() == 2 else "baddbmm", r.at(target), r.at(a), r.at(b)])
    return True


def _bmm_out(r: Any, arguments: tuple[Any, ...], target: Tensor) -> bool:
    a, b = arguments[:2]
    r.steps.append(["bmminto", r.at(target), r.at(a), r.at(b)])
    return True


def _copy(r: Any, arguments: tuple[Any, ...], target: Tensor) -> bool:
    r.steps.append(["copy", r.at(target), r.at(arguments[1])])
    return True


def _addcmul_out(r: Any, arguments: tuple[Any, ...], target: Tensor) -> bool:
    a, b, c, value = arguments[:4]
    if value != 1:
        return False
    r.steps.append(["addcmul", r.at(target), r.at(a), r.at(b), r.at(c)])
    return True


IN_PLACE: dict[str, Callable[[Any, tuple[Any, ...], Tensor], bool]] = {
    "aten.addmm_.default": _addmm,
    "aten.baddbmm_.default": _addmm,
    "aten.bmm.out": _bmm_out,
    "aten.copy_.default": _copy,
    "aten.addcmul.out": _addcmul_out,
}
