"""Backend ``half_cpp`` on the CPU: products of float16, and of up to 32 rows of bfloat16.

The weight comes from memory once, as it lies; bias and activation come before the result is
written. PyTorch's bfloat16 products of few rows do not reach the rate of memory, and its float16
ones reach a fifth of float32's rate where the processor has none of its own.
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.kernels.cpu import half


def reason_not(problem: Problem) -> str | None:
    """Why it cannot serve a forward Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.option("x") == "strided":
        return "the numbers of a row of x have to lie side by side"
    if problem.option("w") != "nk":
        return "the weight has to be (N, K), contiguous"
    return half.reason_not(problem.dtype, problem.dim("M"))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre (M, N) or None).

    Deterministic, whatever the number of threads.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    return half.layer(x, weight, bias, activation, save_pre)
