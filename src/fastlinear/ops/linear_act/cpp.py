"""C++ compiled for this processor: the elementwise passes of training on the CPU, float32.

``forward`` runs the GEMM through torch and the activation through our own kernel, which reads the
pre-activation once (torch composes or vectorises some activations poorly). ``grad_pre`` makes
dpre and the bias gradient in a single pass over dy and the saved tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.ops.common import cpp_elementwise

_FORWARD = ("silu", "gelu_tanh", "quick_gelu", "sigmoid", "relu2")


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
    return cpp_elementwise.reason_not()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre (M, N) or None)."""
    pre = F.linear(x, weight, bias)
    y = torch.empty_like(pre) if save_pre else pre
    cpp_elementwise.activate(activation, pre, y)
    return y, pre if save_pre else None


def grad_pre(
    dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """(dpre, db): dy and saved (M, N) → dpre (M, N), db (N,) or None; db sums in float64."""
    assert saved is not None
    return cpp_elementwise.differentiate(
        activation, dy.contiguous(), saved.contiguous(), need_bias_grad
    )
