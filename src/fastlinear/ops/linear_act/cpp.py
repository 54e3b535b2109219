"""C++ compiled for this processor: the elementwise passes of training on the CPU, float32.

``forward`` runs the GEMM through torch and the activation through our own kernel, which reads the
pre-activation once (torch composes or vectorises some activations poorly). ``grad_pre`` makes
dpre and the bias gradient in a single pass over dy and the saved tensor.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.ops.common import cpp_build
from fastlinear.ops.common.activations import NAMES

_SOURCE = Path(__file__).parent.parent / "common" / "elementwise.cpp"
_CODES = {name: code for code, name in enumerate(NAMES)}  # elementwise.cpp's switch
_FORWARD = ("silu", "gelu_tanh", "quick_gelu", "sigmoid", "relu2")
_CHUNKS = 16  # row chunks with a partial sum each, whatever the number of threads


def reason_not_forward(problem: Problem) -> str | None:
    """Why the C++ activation cannot serve a forward Problem, or None."""
    if problem.option("activation") not in _FORWARD:
        return f"torch's own pass is kept for {problem.option('activation')}"
    return _reason_not(problem)


def reason_not_grad_pre(problem: Problem) -> str | None:
    """Why the C++ derivative cannot serve a grad_pre Problem, or None."""
    if problem.option("activation") in ("none", "gelu"):
        return f"no kernel for the derivative of {problem.option('activation')}"
    return _reason_not(problem)


def _reason_not(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.dtype != "float32":
        return f"float32 only, not {problem.dtype}"
    return cpp_build.reason_not()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre (M, N) or None)."""
    pre = F.linear(x, weight, bias)
    y = torch.empty_like(pre) if save_pre else pre
    code = _library().fastlinear_act(_CODES[activation], pre.data_ptr(), y.data_ptr(), pre.numel())
    assert code == 0
    return y, pre if save_pre else None


def grad_pre(
    dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """(dpre, db): dy and saved (M, N) → dpre (M, N), db (N,) or None; db sums in float64."""
    assert saved is not None
    dy, saved = dy.contiguous(), saved.contiguous()
    m, n = dy.shape
    dpre = torch.empty_like(dy)
    db = dy.new_empty(n) if need_bias_grad else None
    partials = dy.new_empty((_CHUNKS, n), dtype=torch.float64) if need_bias_grad else None
    code = _library().fastlinear_dact(
        _CODES[activation],
        dy.data_ptr(),
        saved.data_ptr(),
        dpre.data_ptr(),
        0 if db is None else db.data_ptr(),
        0 if partials is None else partials.data_ptr(),
        m,
        n,
        _CHUNKS,
    )
    assert code == 0
    return dpre, db


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(_SOURCE)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.fastlinear_act.argtypes = [ctypes.c_int, pointer, pointer, size]
    library.fastlinear_dact.argtypes = [ctypes.c_int, *[pointer] * 5, size, size, size]
    return library
