"""oneDNN on the CPU: GEMMs with bias and activation as post-ops inside the library's kernel.

``forward_packed`` keeps a copy of each weight in oneDNN's blocked layout. The copy is refreshed
when the weight's version counter, storage or a probe of its values changes; the probe (a live
strided view of a dozen elements) catches writes through ``.data`` that bypass the
version counter. A write through ``.data`` to single elements that the probe does not cover is
not seen: call ``forget_packed`` after one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.ops.common.activations import LEAKY_RELU_SLOPE
from fastlinear.ops.common.activations import activation as activation_of

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
# each may miss every cache; prime, so that the probe's stride rarely lines up with a row
_PROBE_ELEMENTS = 13
_PROBE_SIDE = 4


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
    return reason_not(problem)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b): x (M, K), weight (N, K), bias (N,) → (y (M, N), pre or None)."""
    return _run(x, _plain(weight), bias, activation, save_pre)


def forward_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """As ``forward``, with the weight's blocked copy made once and kept while it is valid."""
    return _run(x, _packed(weight, x.shape[0]), bias, activation, save_pre)


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) @ weight (N, K)."""
    dx: Tensor = torch.ops.mkldnn._linear_pointwise(dpre, _plain(weight).t(), None, "none", [], "")
    return dx


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) @ x (M, K)."""
    dw: Tensor = torch.ops.mkldnn._linear_pointwise(dpre.t(), _plain(x).t(), None, "none", [], "")
    return dw


def _plain(matrix: Tensor) -> Tensor:
    """The matrix itself where oneDNN can describe its strides, else a contiguous copy."""
    rows, columns = matrix.shape
    across, along = matrix.stride()
    if (along == 1 and across >= columns) or (across == 1 and along >= rows):
        return matrix
    return matrix.contiguous()


def forget_packed() -> None:
    """Drop every packed weight; the next call packs again."""
    _packs.clear()


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
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


@dataclass(slots=True)
class _Pack:
    blocked: Tensor
    version: int
    pointer: int
    seen: Tensor  # what the probe read when the weight was packed

    def valid_for(self, weight: Tensor) -> bool:
        return (
            self.version == weight._version
            and self.pointer == weight.data_ptr()
            and torch.equal(_probe(weight), self.seen)
        )


# (id of the base tensor, shape, strides, offset) → (weak reference, its pack). A view (Conv1D's
# transpose) is made anew at every call, so the base is what lives.
_packs: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], _Pack]] = {}


def _packed(weight: Tensor, rows: int) -> Tensor:
    if weight.is_inference():
        # No version counter: nothing says when it changes, so nothing is kept.
        blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        return blocked
    base = weight._base if weight._base is not None else weight
    key = (id(base), weight.shape, weight.stride(), weight.storage_offset())
    held = _packs.get(key)
    if held is not None and held[0]() is base and held[1].valid_for(weight):
        return held[1].blocked
    detached = weight.detach()
    blocked = torch.ops.mkldnn._reorder_linear_weight(detached.contiguous(), rows)
    seen = _probe(detached).clone()
    pack = _Pack(blocked, weight._version, weight.data_ptr(), seen)
    _packs[key] = (weakref.ref(base, lambda _: _packs.pop(key, None)), pack)
    return blocked


def _probe(weight: Tensor) -> Tensor:
    """A dozen elements of the weight, as a view; nothing keeps its storage alive."""
    n, k = weight.shape
    across, along = weight.stride()
    size: tuple[int, ...]
    strides: tuple[int, ...]
    if (along == 1 and across == k) or (across == 1 and along == n):  # dense: one stride does
        step = max(1, n * k // _PROBE_ELEMENTS)
        size, strides = (-(-n * k // step),), (step,)
    else:
        row, column = max(1, n // _PROBE_SIDE), max(1, k // _PROBE_SIDE)
        size = (-(-n // row), -(-k // column))
        strides = (across * row, along * column)
    return torch.as_strided(weight.detach(), size, strides, weight.storage_offset())
