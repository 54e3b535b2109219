"""oneDNN on the CPU: GEMMs with bias and activation as post-ops inside the library's kernel.

oneDNN's relu makes 0 of NaN where torch's keeps it, so relu is a pass of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import LEAKY_RELU_SLOPE
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem

# fastlinear's activation → (post-op, its scalars, its algorithm)
_POST_OPS: dict[str, tuple[str, list[float], str]] = {
    "none": ("none", [], ""),
    "silu": ("swish", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
    "sigmoid": ("sigmoid", [], ""),
    "tanh": ("tanh", [], ""),
    "leaky_relu": ("leaky_relu", [LEAKY_RELU_SLOPE], ""),
}


def reason_not(problem: Problem) -> str | None:
    """Why oneDNN cannot serve a Problem of any piece, or None."""
    if problem.device != "cpu":
        return "oneDNN runs on the CPU only"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch lacks mkldnn._linear_pointwise"
    if problem.dtype == "float32":
        return None
    if problem.dtype == "bfloat16":
        ok = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return None if ok else "oneDNN has no bfloat16 path on this processor"
    if problem.dtype == "float16":
        ok = torch.ops.mkldnn._is_mkldnn_fp16_supported()
        return None if ok else "oneDNN has no float16 path on this processor"
    return f"oneDNN has no {problem.dtype} path"


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre or None)."""
    return product(x, dense(weight), bias, activation, save_pre)


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) @ weight (N, K)."""
    dx: Tensor = torch.ops.mkldnn._linear_pointwise(dpre, dense(weight).t(), None, "none", [], "")
    return dx


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) @ x (M, K)."""
    dw: Tensor = torch.ops.mkldnn._linear_pointwise(dpre.t(), dense(x).t(), None, "none", [], "")
    return dw


def plain(matrix: Tensor) -> Tensor:
    """The matrix itself where oneDNN can describe its strides, else a contiguous copy."""
    rows, columns = matrix.shape
    across, along = matrix.stride()
    if (along == 1 and across >= columns) or (across == 1 and along >= rows):
        return matrix
    return matrix.contiguous()


def dense(matrix: Tensor) -> Tensor:
    """The matrix itself where oneDNN multiplies by it in blocks, else a contiguous copy.

    A second factor whose rows or columns lie apart takes it a hundred times as long, number by
    number, and each sum is then one of all products in a row.
    """
    whole = matrix.is_contiguous() or matrix.t().is_contiguous()
    return matrix if whole else matrix.contiguous()


def is_post_op(activation: str) -> bool:
    """Whether oneDNN's product computes the activation in its epilogue, in inference."""
    return activation in _POST_OPS  # without relu: see product


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """As ``forward``, for a weight that is ``dense``."""
    if bias is not None:
        bias = bias.contiguous()  # oneDNN reads N numbers in a row whatever the stride
    if activation == "relu" and not save_pre:
        # oneDNN's own relu turns NaN into 0, which would hide what torch shows
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y.relu_(), None
    post_op = _POST_OPS.get(activation)
    if save_pre or post_op is None:
        pre = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        act = activation_of(activation)
        return (act.value(pre), pre) if save_pre else (act.over(pre), None)
    name, scalars, algorithm = post_op
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, scalars, algorithm), None
