"""Backend ``widened`` of families that are chosen by pieces: 16 bits on a CPU, in float32.

Few processors multiply float16, and older ones no bfloat16: PyTorch's products of them, and ours,
may then take many times as long as float32's. Inputs are widened, the backend that dispatch takes
for the same piece in float32 runs, and results are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import WIDENED, Family
from fastlinear.dispatch.select import select
from fastlinear.dispatch.work import Work


def load(p: Problem) -> Callable[..., Any]:
    """The function for calls of a Problem's kind."""
    run, dtype = select(_single(p)).load(), FLOAT_DTYPES[p.dtype]

    def widened(*arguments: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):  # which would have float32 products in 16 bits
            with torch.autocast("cpu", enabled=False):
                return widened(*arguments)
        return _to(torch.float32, run(*_to(dtype, arguments, torch.float32)), dtype)

    return widened


def work(family: Family, p: Problem) -> tuple[Work, ...] | None:
    """The work in float32, and passes over all numbers that are read or written."""
    q = _single(p)
    inner = family.work_of(q, select(q, ready=False).backend.name)
    return None if inner is None else _with_passes(family, p, inner)


def inside(family: Family, p: Problem, works: Iterable[Work]) -> tuple[Work, ...]:
    """The same of a backend that widens and rounds within its own call, which costs less."""
    return _with_passes(family, p, works, "inside")


def _with_passes(
    family: Family, p: Problem, works: Iterable[Work], *variants: str
) -> tuple[Work, ...]:
    numbers = family.cost(p).bytes / FLOAT_DTYPES[p.dtype].itemsize
    passes = Work(WIDENED, numbers, {"numbers": numbers}, variants=variants)
    return (*(replace(w, dtype="float32") for w in works), passes)


def _single(p: Problem) -> Problem:
    return replace(p, dtype="float32", precision=matmul_precision(torch.float32))


def _to(of: torch.dtype, given: Any, dtype: torch.dtype) -> Any:
    """The tensors of one dtype in another, wherever they stand."""
    if isinstance(given, Tensor):
        return given.to(dtype) if given.dtype is of else given
    if isinstance(given, (tuple, list)):
        made: Callable[[Any], Any] = getattr(type(given), "_make", type(given))  # or a named tuple
        return made(_to(of, item, dtype) for item in given)
    return given
