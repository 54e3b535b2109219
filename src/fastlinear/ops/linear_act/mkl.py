"""MKL on the CPU with packed weights, float32 inference: its GEMM without packing at every call.

MKL packs a weight for one number of rows. A weight keeps packs for the first few batch sizes it
meets and serves further ones through torch's own linear, so that batches of ever new sizes cost
neither memory nor time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.ops.common import cpp_elementwise, packed
from fastlinear.ops.common.activations import LEAKY_RELU_SLOPE
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.packed import Packs

_BATCH_SIZES = 2  # each is a copy of the weight
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda pre: pre,
    "relu": torch.relu_,
    "silu": lambda pre: F.silu(pre, inplace=True),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "leaky_relu": lambda pre: F.leaky_relu_(pre, LEAKY_RELU_SLOPE),
}
_IN_CPP = ("gelu_tanh", "quick_gelu", "relu2")  # where torch has no fast pass in place
_packs: Packs[dict[int, Tensor]] = Packs()  # weight → number of rows → its pack


def reason_not(problem: Problem) -> str | None:
    """Why MKL with packed weights cannot serve a forward Problem, or None."""
    if problem.device != "cpu":
        return "MKL runs on the CPU only"
    if problem.dtype != "float32":
        return f"float32 only, not {problem.dtype}"
    if problem.needs_grad:
        return "a packed weight is kept for inference only: training changes it every step"
    if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkl, "_mkl_linear"):
        return "this build of torch has no MKL with packed weights"
    return packed.reason_not()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre or None); float32."""
    if bias is not None:
        bias = bias.contiguous()
    rows = x.shape[0]
    pack = _pack(weight, rows)
    if pack is None:
        pre = F.linear(x, weight, bias)
    else:
        pre = torch.ops.mkl._mkl_linear(x, pack, weight, bias, rows)
    if save_pre:
        return activation_of(activation).value(pre), pre
    in_place = _IN_PLACE.get(activation)
    if in_place is not None:
        return in_place(pre), None
    if activation in _IN_CPP and cpp_elementwise.why_not_loaded() is None:
        cpp_elementwise.activate(activation, pre, pre)
        return pre, None
    return activation_of(activation).value(pre), None


def forget_packed() -> None:
    """Drop every packed weight; the next call packs again."""
    _packs.clear()


def _pack(weight: Tensor, rows: int) -> Tensor | None:
    """The weight packed for that many rows; None where torch's own linear is to serve."""
    packs = _packs.glance(weight)
    if packs is not None and rows not in packs and len(packs) >= _BATCH_SIZES:
        return None
    packs = _packs.get(weight)
    if packs is None:
        if not _packs.keeps(weight) or _packs.fleeting(weight):  # it would serve this one call
            return None
        packs = _packs.make(weight, dict)
    if rows not in packs:
        detached = weight.detach().contiguous()
        packs[rows] = torch.ops.mkl._mkl_reorder_linear_weight(detached, rows)
    return packs[rows]
