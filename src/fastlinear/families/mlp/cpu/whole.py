"""The whole net in one C++ call on the CPU, forward and backward.

Compiled for this very processor. Activations stay in the thread's cache; weights are read where
they lie at every call, so nothing can be stale. Sums run in float32, at most 64 products (128
where vectors are 8 wide, 256 where 4) before they join the total. Results do not depend on the
number of threads. Numbers of 16 bits are widened where they come in, and results rounded once.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.mlp.problem import layer_activations, widths_of
from fastlinear.families.mlp.reference import Biases, Needs, Weights, first_needed
from fastlinear.fastpath import recorder
from fastlinear.native import cpp_build

_SOURCE = Path(__file__).parent / "mlp.cpp"
_FEW_ROWS = 16  # mlp_forward.h's kDotRows: any width
_MAX_WIDTH = 8192
_MAX_BACKWARD_ROWS = 512
_MAX_BACKWARD_WIDTH = 2048
_MAX_WIDENED = 1 << 22
"""Weights of 16 bits that a call widens: threads keep the memory."""


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve the Problem, or None."""
    if p.device != "cpu":
        return "compiled for the CPU only"
    if p.dtype == "float64":
        return "serves no float64"
    widths = widths_of(p)
    if p.dim("M") < 1 or min(widths) < 1:
        return "an empty dimension"
    if max(widths) > _MAX_WIDTH and p.dim("M") > _FEW_ROWS:
        return f"more than {_FEW_ROWS} rows of a width of more than {_MAX_WIDTH}: {max(widths)}"
    if p.option("w") != "nk":
        return "needs contiguous weights"
    weights = sum(k * n for k, n in pairwise(widths))
    if p.dtype != "float32" and weights > _MAX_WIDENED:
        return f"{weights} weights are more than the {_MAX_WIDENED} of 16 bits that it widens"
    if p.piece == "backward":
        if p.dim("M") > _MAX_BACKWARD_ROWS:
            return f"{p.dim('M')} rows are more than the {_MAX_BACKWARD_ROWS} its backward holds"
        if max(widths) > _MAX_BACKWARD_WIDTH:
            return (
                f"a width of {max(widths)} is more than the {_MAX_BACKWARD_WIDTH} of its backward"
            )
    return cpp_build.reason_not() or cpp_build.failed(_SOURCE)


def forward(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y, saved): x (M, n_0) → y (M, n_L); saved as in ``reference.forward``."""
    x = x.contiguous()
    m, layers = x.shape[0], len(weights)
    y = x.new_empty((m, weights[-1].shape[0]))
    saved: tuple[Tensor, ...] = ()
    if save:
        # each of its own: results of a registered op must not share memory
        hidden = [x.new_empty((m, w.shape[0])) for w in weights[:-1]]
        pre = activation_of(final_activation).saved == "pre"
        saved = (*hidden, torch.empty_like(y) if pre else y)
    recorder.run(
        *_function("forward", x.dtype),
        layers,
        _widths(weights),
        (ctypes.c_int32 * layers)(*codes(layers, activation, final_activation)),
        list(weights),
        list(biases),
        x,
        y,
        list(saved) if save else None,
        m,
    )
    return y, saved


def backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    saved: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    needs: Needs,
) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """(dx, dWs, dbs), each None where not needed; dy (M, n_L)."""
    need_x, need_ws, need_bs = needs
    dy, x = dy.contiguous(), x.contiguous()
    saved = tuple(s.contiguous() for s in saved[: len(weights)])  # others are outputs
    m, layers = x.shape[0], len(weights)
    dx = torch.empty_like(x) if need_x else None
    dws = tuple(
        w.new_empty(w.shape) if need else None for w, need in zip(weights, need_ws, strict=True)
    )
    dbs = tuple(
        w.new_empty(w.shape[0]) if need else None for w, need in zip(weights, need_bs, strict=True)
    )
    recorder.run(
        *_function("backward", x.dtype),
        layers,
        _widths(weights),
        (ctypes.c_int32 * layers)(*codes(layers, activation, final_activation)),
        list(weights),
        x,
        list(saved),
        dy,
        dx,
        list(dws),
        list(dbs),
        first_needed(needs),
        m,
    )
    return dx, dws, dbs


def codes(layers: int, activation: str, final_activation: str) -> tuple[int, ...]:
    """Each layer's activation by its number."""
    return tuple(CODES[n] for n in layer_activations(layers, activation, final_activation))


@lru_cache(maxsize=1)
def address() -> int:
    """Address of ``fastlinear_mlp_forward``, for the compiled fast path."""
    return cpp_build.address(_library().fastlinear_mlp_forward)


def _widths(weights: Weights) -> Any:
    return (ctypes.c_int64 * (len(weights) + 1))(
        weights[0].shape[1], *(w.shape[0] for w in weights)
    )


def _function(piece: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """The C++ function of a piece, and what comes before its other arguments."""
    if dtype is torch.float32:
        return (getattr(_library(), f"fastlinear_mlp_{piece}"),)
    return getattr(_library(), f"fastlinear_mlp_{piece}_half"), int(dtype is torch.bfloat16)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(_SOURCE)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    forward, backward = [size, *[pointer] * 7, size], [size, *[pointer] * 9, size, size]
    for name, types in (("forward", forward), ("backward", backward)):
        for end, first in (("", []), ("_half", [ctypes.c_int])):
            function = getattr(library, f"fastlinear_mlp_{name}{end}")
            function.argtypes, function.restype = [*first, *types], None
    return library
