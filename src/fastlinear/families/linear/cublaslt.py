"""cuBLASLt's epilogue through torch: bias and activation inside the library's own GEMM kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.core.problem import Problem


def reason_not(problem: Problem) -> str | None:
    """Why cuBLASLt's epilogue cannot serve a forward Problem, or None."""
    if problem.device != "cuda":
        return "cuBLASLt runs on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if problem.dtype == "float32":
        return "its GELU is less exact than float32 allows: 2 to 17 times torch's error, measured"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"no epilogue for {problem.dtype}"
    if problem.option("activation") == "relu":
        return "its relu turns NaN into 0, unlike torch's"
    if problem.option("activation") != "gelu_tanh":
        return "torch's entry point knows gelu_tanh and relu only"
    if problem.option("bias") != "yes":
        return "torch's entry point requires a bias"
    if problem.needs_grad:
        return "torch's entry point does not return the pre-activation the backward needs"
    return None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """gelu_tanh(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), None)."""
    assert bias is not None
    assert activation == "gelu_tanh"
    assert not save_pre
    return torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True), None
