"""C++ compiled for this processor: the elementwise passes beside PyTorch's products, float32.

``forward`` runs the GEMM through torch, and adds the bias and applies the activation in one pass of
our own: torch copies the bias over the output before the product, and composes or vectorises some
activations poorly. ``grad_pre`` makes dpre and the bias gradient in a single pass over dy and the
saved tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.kernels.cpu import elementwise

_FORWARD = ("silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "relu2")


def reason_not_forward(problem: Problem) -> str | None:
    """Why the C++ activation cannot serve a forward Problem, or None."""
    name = problem.option("activation")
    if name not in _FORWARD and problem.option("bias") == "no":
        return f"torch's own pass is kept for {name} without a bias"
    return _reason_not(problem)


def reason_not_grad_pre(problem: Problem) -> str | None:
    """Why the C++ derivative cannot serve a grad_pre Problem, or None."""
    if problem.option("activation") == "none":
        return "no derivative to compute"
    return _reason_not(problem)


def _reason_not(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.dtype != "float32":
        return f"float32 only, not {problem.dtype}"
    return elementwise.reason_not()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre (M, N) or None)."""
    pre = F.linear(x, weight)
    y = torch.empty_like(pre) if save_pre else pre
    if bias is None:
        elementwise.activate(activation, pre, y)
        return y, pre if save_pre else None
    first = "none" if activation == "tanh" else activation
    kept = pre if save_pre else None
    elementwise.activate_with_bias(first, pre, bias.contiguous(), y, kept)
    return torch.tanh_(y) if activation == "tanh" else y, kept


def grad_pre(
    dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """(dpre, db): dy and saved (M, N) → dpre (M, N), db (N,) or None; db sums in float64."""
    assert saved is not None
    return elementwise.differentiate(
        activation, dy.contiguous(), saved.contiguous(), need_bias_grad
    )
