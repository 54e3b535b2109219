"""oneDNN on the CPU: GEMMs with bias and activation as post-ops inside the library's kernel.

oneDNN's relu makes 0 of NaN where torch's keeps it, so it is used only where the result itself
proves that no NaN was met; elsewhere relu is a pass of its own.

``forward_packed`` keeps a copy of each weight in oneDNN's blocked layout, as long as
``common/packed.py``, which reads the whole weight at every call, finds it unchanged;
``forget_packed`` drops the copies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastlinear.core.device import is_amd
from fastlinear.core.problem import Problem
from fastlinear.ops.common import cpp_elementwise, packed
from fastlinear.ops.common.activations import LEAKY_RELU_SLOPE
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.packed import Packs

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
# below these sizes of y a pass of its own costs as little as the proof that none is needed
_PROOF_ELEMENTS = 1 << 19
_PROOF_COLUMNS = 128
# oneDNN is ahead of MKL on AMD's processors from so many numbers of a weight, multiplications on
_LARGE_WEIGHT = 1 << 20
_LARGE_PRODUCT = 1 << 25


def is_heavy(problem: Problem) -> bool:
    """Whether a forward has arithmetic to save: oneDNN's call costs more than MKL's, which a node
    in C++ makes without Python. On AMD's processors MKL reads large weights at half the rate where
    rows are few."""
    least = 1 << (23 if problem.needs_grad else 21)
    m, k, n = problem.dim("M"), problem.dim("K"), problem.dim("N")
    few = is_amd() and problem.dtype == "float32" and not problem.needs_grad
    return (m >= 8 and m * k * n >= least) or (few and m > 0 and k * n >= _LARGE_WEIGHT)


def pays(problem: Problem) -> bool:
    """Whether a piece is oneDNN's where nothing was measured: forwards with an activation to fuse;
    on AMD's processors those without one and dx as well, in float32."""
    amd = is_amd() and problem.dtype == "float32"
    if problem.piece == "grad_input":
        return amd and math.prod(problem.dim(name) for name in "MKN") >= _LARGE_PRODUCT
    fused = amd or problem.option("activation") != "none"
    return problem.piece == "forward" and fused and is_heavy(problem)


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


def reason_not_packed(problem: Problem) -> str | None:
    """Why a prepacked weight cannot serve a forward Problem, or None."""
    if problem.needs_grad:
        return "a prepacked weight is kept for inference only: training changes it every step"
    return reason_not(problem) or packed.reason_not()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre or None)."""
    return product(x, plain(weight), bias, activation, save_pre)


def forward_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """As ``forward``, with the weight's blocked copy made once and kept while it is valid."""
    blocked, finite = _packed(weight, x.shape[0])
    if activation == "relu" and finite and not save_pre and _provable(x, weight):
        if bias is not None:
            bias = bias.contiguous()
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "relu", [], "")
        if cpp_elementwise.proves_no_nan(y, x, bias):
            return y, None
    return product(x, blocked, bias, activation, save_pre)


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) @ weight (N, K)."""
    dx: Tensor = torch.ops.mkldnn._linear_pointwise(dpre, plain(weight).t(), None, "none", [], "")
    return dx


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) @ x (M, K)."""
    dw: Tensor = torch.ops.mkldnn._linear_pointwise(dpre.t(), plain(x).t(), None, "none", [], "")
    return dw


def plain(matrix: Tensor) -> Tensor:
    """The matrix itself where oneDNN can describe its strides, else a contiguous copy."""
    rows, columns = matrix.shape
    across, along = matrix.stride()
    if (along == 1 and across >= columns) or (across == 1 and along >= rows):
        return matrix
    return matrix.contiguous()


def forget_packed() -> None:
    """Drop every packed weight; the next call packs again."""
    _packs.clear()


def is_post_op(activation: str) -> bool:
    """Whether oneDNN's product computes the activation in its epilogue, in inference."""
    return activation in _POST_OPS  # without relu: see product


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """As ``forward``, for a weight that is ``plain`` or blocked."""
    if bias is not None:
        bias = bias.contiguous()  # oneDNN reads N numbers in a row whatever the stride
    if activation == "relu" and not save_pre:
        # oneDNN's own relu turns NaN into 0, which would hide what torch shows
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y.relu_(), None
    post_op = _POST_OPS.get(activation)
    if save_pre or post_op is None:
        pre = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return activation_of(activation).value(pre), pre if save_pre else None
    name, scalars, algorithm = post_op
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, scalars, algorithm), None


def _provable(x: Tensor, weight: Tensor) -> bool:
    """Whether proving a fused relu right pays, and can be done here."""
    m, n = x.shape[0], weight.shape[0]
    return (
        n >= _PROOF_COLUMNS
        and m * n >= _PROOF_ELEMENTS
        and x.dtype is torch.float32
        and x.stride(1) == 1
        and cpp_elementwise.why_not_loaded() is None
    )


# weight → its blocked copy, and whether all of it is known to be finite
_packs: Packs[tuple[Tensor, bool]] = Packs()


def _packed(weight: Tensor, rows: int) -> tuple[Tensor, bool]:
    kept = _packs.get(weight)
    if kept is None:
        if not _packs.keeps(weight) or _packs.fleeting(weight):  # a copy would serve this one call
            return plain(weight), False
        kept = _packs.make(weight, lambda: _blocked(weight.detach(), rows))
    return kept


def _blocked(weight: Tensor, rows: int) -> tuple[Tensor, bool]:
    finite = math.isfinite(float(weight.sum(dtype=torch.float64)))
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows), finite
