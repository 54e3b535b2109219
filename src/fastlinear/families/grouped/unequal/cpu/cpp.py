"""The groups on the CPU, one C++ call forward and one backward, compiled for this processor.

float32 with 512-bit vectors, bfloat16 with AMX tiles or pairs in vectors, by the blocks of
grouped_linear; bias and activation cost no pass of their own. Threads share the groups, and the
parts of large ones.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastlinear.activations.reference import CODES
from fastlinear.core.problem import Problem
from fastlinear.families.grouped.cpu.cpp import why_no_products
from fastlinear.families.grouped.unequal.layout import Backward, Forward, Sizes
from fastlinear.fastpath import recorder
from fastlinear.kernels.cpu.grouped import why_no_vectors
from fastlinear.native import cpp_build

SOURCE = Path(__file__).with_name("unequal.cpp")
_NOWHERE = -1
_MAX_TABLES = 1024
_Places = tuple[int | None, ...]


def reason_not(problem: Problem) -> str | None:
    """Why the C++ products cannot serve a Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "its kernels run on CUDA devices and CPUs only"
    if (why := why_no_vectors()) is not None:
        return why
    return why_no_products(problem, SOURCE, lambda: _library().fastlinear_unequal_half())


def forward(call: Forward, device: torch.device) -> None:
    """Compute y and, where it is kept, the pre-activation."""
    table, order = _described(call)
    lists = ([ts[g] for g in order] for ts in (call.xs, call.weights, call.biases))
    recorder.run(_library().fastlinear_unequal_forward, table, *lists, call.y, call.pre)


def backward(call: Backward, device: torch.device) -> None:
    """Compute the gradients."""
    table, order = _described(call)
    dys, saved, xs, weights = (
        None if ts is None else [ts[g] for g in order]
        for ts in (call.dys, call.saved, call.xs, call.weights)
    )
    given = dys, saved, call.pre, xs, weights, call.dx, call.dw, call.db
    recorder.run(_library().fastlinear_unequal_backward, table, *given)


def _described(call: Forward | Backward) -> tuple[Any, tuple[int, ...]]:
    places: tuple[_Places, ...]
    if isinstance(call, Backward):
        places = call.x_pitch, call.dy_pitch, call.offsets, call.dx_at, call.dw_at, call.db_at
    else:
        places = call.x_pitch, _none(call), call.offsets, _none(call), _none(call), _none(call)
    return _table(call.sizes, places, CODES[call.activation], call.dtype is torch.bfloat16)


def _none(call: Forward) -> _Places:
    return (None,) * len(call.sizes)


@lru_cache(maxsize=_MAX_TABLES)
def _table(
    sizes: Sizes, places: tuple[_Places, ...], activation: int, half: bool
) -> tuple[Any, tuple[int, ...]]:
    """The numbers of a call as ``unequal.cpp`` reads them, and its groups in their order there:
    what takes long begins early."""
    order = sorted(range(len(sizes)), key=lambda g: -sizes[g][0] * sizes[g][1] * sizes[g][2])
    numbers = [len(sizes), activation, int(half)]
    for g in order:
        numbers += sizes[g]
        numbers += [_NOWHERE if (at := found[g]) is None else at for found in places]
    return (ctypes.c_int64 * len(numbers))(*numbers), tuple(order)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return cpp_build.load_calls(SOURCE, fastlinear_unequal_forward=6, fastlinear_unequal_backward=9)
