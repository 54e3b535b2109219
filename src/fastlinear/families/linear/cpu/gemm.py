"""Backend ``gemm_cpp`` on the CPU, float32: our own products, with a pass for bias and activation.

On AMD's processors neither MKL's nor oneDNN's products of some dozens of rows reach the rate of
large ones. On Intel's MKL does, and these are no faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.kernels.cpu import elementwise, gemm


def reason_not(problem: Problem) -> str | None:
    """Why it cannot serve a Problem of a piece with a product, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.dtype != "float32":
        return f"float32 only, not {problem.dtype}"
    return gemm.reason_not() or elementwise.reason_not()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) or None → (y (M, N), pre (M, N) or None).

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    pre = gemm.product(_readable(x), _readable(weight.t()))
    kept = pre if save_pre else None
    if activation == "none" and bias is None:
        return pre, kept
    if bias is None and activation == "tanh":  # torch's own is the faster one
        return torch.tanh(pre) if save_pre else torch.tanh_(pre), kept
    y = torch.empty_like(pre) if save_pre else pre
    if bias is None:
        elementwise.activate(activation, pre, y)
        return y, kept
    first = "none" if activation == "tanh" else activation
    elementwise.activate_with_bias(first, pre, bias.contiguous(), y, kept)
    return torch.tanh_(y) if activation == "tanh" else y, kept


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) @ weight (N, K)."""
    return gemm.product(_readable(dpre), _readable(weight))


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) @ x (M, K)."""
    return gemm.product(_readable(dpre).t(), _readable(x))


def _readable(matrix: Tensor) -> Tensor:
    return matrix if gemm.readable(matrix) else matrix.contiguous()
