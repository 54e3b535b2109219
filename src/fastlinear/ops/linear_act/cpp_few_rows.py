"""Backend ``few_rows_cpp`` on the CPU, bfloat16 and float16: up to 16 rows of x.

The weight is read once, as it lies; bias and activation come before the result is written. What so
few rows cost is reading the weight, and PyTorch's 16-bit products of few rows do not reach the rate
of memory.
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.device import cpu_flags
from fastlinear.core.problem import Problem
from fastlinear.ops.common import cpp_few_rows

_LEAST_WEIGHT = 1 << 18  # numbers from which reading them outweighs Python's call
_MOST_SINGLE_ROW = 1 << 21  # of float16, from which PyTorch's products of one row read as fast


def reason_not(problem: Problem) -> str | None:
    """Why it cannot serve a forward Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.option("x") == "strided":
        return "the numbers of a row of x have to lie side by side"
    if problem.option("w") != "nk":
        return "the weight has to be (N, K), contiguous"
    return cpp_few_rows.reason_not(problem.dtype, problem.dim("M"))


def pays(problem: Problem) -> bool:
    """Whether it is taken where nothing was measured."""
    m, weight = problem.dim("M"), problem.dim("K") * problem.dim("N")
    serves = problem.piece == "forward" and reason_not(problem) is None
    return serves and pays_for(problem.dtype, m, weight)


def pays_for(dtype: str, rows: int, weight: int) -> bool:
    """Whether so many rows and numbers of a weight are worth a call from Python: on processors
    whose library has no tiles (AMX) for the dtype."""
    if dtype == "bfloat16" and "amx_bf16" in cpu_flags():
        return False
    most = _MOST_SINGLE_ROW if dtype == "float16" and rows == 1 else weight
    return _LEAST_WEIGHT <= weight <= most and cpp_few_rows.why_not_loaded() is None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre (M, N) or None).

    Deterministic, whatever the number of threads.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    return cpp_few_rows.layer(x, weight, bias, activation, save_pre)
