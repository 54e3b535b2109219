"""Backend ``half_cpp`` on the CPU: products of float16, and of up to 32 rows of bfloat16.

The weight comes from memory once, as it lies; bias and activation come before the result is
written. PyTorch's bfloat16 products of few rows do not reach the rate of memory, and its float16
ones reach a fifth of float32's rate where the processor has none of its own.
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.device import cpu_flags
from fastlinear.core.problem import Problem
from fastlinear.kernels.cpu import half

_LEAST_WEIGHT = 1 << 18  # numbers from which reading them outweighs Python's call


def reason_not(problem: Problem) -> str | None:
    """Why it cannot serve a forward Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.option("x") == "strided":
        return "the numbers of a row of x have to lie side by side"
    if problem.option("w") != "nk":
        return "the weight has to be (N, K), contiguous"
    return half.reason_not(problem.dtype, problem.dim("M"))


def pays(problem: Problem) -> bool:
    """Whether it is taken where nothing was measured."""
    weight = problem.dim("K") * problem.dim("N")
    serves = problem.piece == "forward" and reason_not(problem) is None
    return serves and pays_for(problem.dtype, weight)


def pays_for(dtype: str, weight: int) -> bool:
    """Whether a weight of so many numbers is worth a call from Python: on processors
    without tiles (AMX) for bfloat16, or arithmetic for float16, of which the library makes use."""
    if {"bfloat16": "amx_bf16", "float16": "avx512_fp16"}.get(dtype) in cpu_flags():
        return False
    return weight >= _LEAST_WEIGHT and half.why_not_loaded() is None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre (M, N) or None).

    Deterministic, whatever the number of threads.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    return half.layer(x, weight, bias, activation, save_pre)
