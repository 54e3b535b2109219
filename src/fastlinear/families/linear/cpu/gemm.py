"""Backend ``gemm_cpp`` on the CPU, float32: our own products, with a pass for bias and activation.

On AMD's processors neither MKL's nor oneDNN's products of some dozens of rows reach the rate of
large ones. On Intel's MKL does, and these are no faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.core.device import cpu_flags, is_amd, is_wide_amd
from fastlinear.core.problem import Problem
from fastlinear.kernels.cpu import elementwise, gemm

_LEAST_PRODUCT = 1 << 24  # multiplications
# on AMD's processors of 512 bits: multiplications from which a product is ours, and from which one
# of x is oneDNN's; numbers of a weight from which it reads that faster; rows from which dx may be
# oneDNN's
_LEAST_WIDE = 1 << 20
_MOST_WIDE = {"forward": 1 << 27, "grad_input": 1 << 25}
_MOST_WEIGHT_WIDE = 1 << 20
_FEW_ROWS_WIDE = 256


def reason_not(problem: Problem) -> str | None:
    """Why it cannot serve a Problem of a piece with a product, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.dtype != "float32":
        return f"float32 only, not {problem.dtype}"
    return gemm.reason_not() or elementwise.reason_not()


def pays(problem: Problem) -> bool:
    """Whether a piece is taken where nothing was measured: on AMD's processors without AVX-512 and
    on those that compute 512 bits at a time, the only ones of AMD that it was timed on. On the
    latter oneDNN's large products of x are faster."""
    least = {"forward": 16, "grad_input": 16, "grad_weight": 32}.get(problem.piece)
    if least is None or reason_not(problem) is not None:
        return False
    m, k, n = (problem.dim(name) for name in ("M", "K", "N"))
    if is_wide_amd():
        served = m >= 16 and _pays_wide(problem.piece, m, k, n)
    else:
        narrow = is_amd() and "avx512f" not in cpu_flags()
        served = narrow and m >= least and m * k * n >= _LEAST_PRODUCT
    return served and gemm.why_not_loaded() is None


def _pays_wide(piece: str, m: int, k: int, n: int) -> bool:
    """``pays`` on AMD's processors of 512 bits."""
    product = m * k * n
    if product < _LEAST_WIDE or piece == "grad_weight":
        return product >= _LEAST_WIDE
    if piece == "grad_input":
        return m < _FEW_ROWS_WIDE or product < _MOST_WIDE[piece]
    return k * n < _MOST_WEIGHT_WIDE and product < _MOST_WIDE[piece]


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
