"""oneDNN on the CPU: GEMMs with bias and activation as post-ops inside the library's kernel.

oneDNN's relu makes 0 of NaN where torch's keeps it, so it is used only where the result itself
proves that no NaN was met; elsewhere relu is a pass of its own.

``forward_packed`` keeps a copy of each weight in oneDNN's blocked layout. The copy is refreshed
when the weight's version counter, storage or a probe of its values changes; the probe (a dozen
elements, read where they lie) catches writes through ``.data`` that bypass the version counter.
A write through ``.data`` to single elements that the probe does not cover is not seen: call
``forget_packed`` after one.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.ops.common import cpp_elementwise
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
# below these sizes of y a pass of its own costs as little as the proof that none is needed
_PROOF_ELEMENTS = 1 << 19
_PROOF_COLUMNS = 128


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
    blocked, finite = _packed(weight, x.shape[0])
    if activation == "relu" and finite and not save_pre and _provable(x, weight):
        if bias is not None:
            bias = bias.contiguous()
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "relu", [], "")
        if cpp_elementwise.proves_no_nan(y, x, bias):
            return y, None
    return _run(x, blocked, bias, activation, save_pre)


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


@dataclass(slots=True)
class _Pack:
    blocked: Tensor
    finite: bool  # no NaN or infinity in it
    version: int
    pointer: int
    probe: np.ndarray[Any, Any]  # the weight's own memory: read only while ``pointer`` holds
    seen: bytes  # what the probe read when the weight was packed

    def valid_for(self, weight: Tensor) -> bool:
        return (
            self.version == weight._version
            and self.pointer == weight.data_ptr()
            and self.probe.tobytes() == self.seen
        )


# (id of the base tensor, shape, strides, offset) → (weak reference, its pack). A view (Conv1D's
# transpose) is made anew at every call, so the base is what lives.
_packs: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], _Pack]] = {}


def _packed(weight: Tensor, rows: int) -> tuple[Tensor, bool]:
    """The weight's blocked copy, and whether all of it is known to be finite."""
    if weight.is_inference():
        # No version counter: nothing says when it changes, so nothing is kept.
        return _blocked(weight, rows), False
    base = weight._base if weight._base is not None else weight
    key = (id(base), weight.shape, weight.stride(), weight.storage_offset())
    held = _packs.get(key)
    if held is not None and held[0]() is base and held[1].valid_for(weight):
        return held[1].blocked, held[1].finite
    detached = weight.detach()
    probe = _probe(detached)
    pack = _Pack(
        _blocked(detached, rows),
        math.isfinite(float(detached.sum(dtype=torch.float64))),
        weight._version,
        weight.data_ptr(),
        probe,
        probe.tobytes(),
    )
    _packs[key] = (weakref.ref(base, lambda _: _packs.pop(key, None)), pack)
    return pack.blocked, pack.finite


def _blocked(weight: Tensor, rows: int) -> Tensor:
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return blocked


def _probe(weight: Tensor) -> np.ndarray[Any, Any]:
    """A dozen elements of the weight where they lie; keeps its storage alive no more than a number.

    Torch's own views would, and cost ten times as much to read.
    """
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
    width = weight.element_size()
    extent = 1 + sum((count - 1) * stride for count, stride in zip(size, strides, strict=True))
    memory = (ctypes.c_char * (extent * width)).from_address(weight.data_ptr())
    numbers = np.frombuffer(memoryview(memory), f"u{width}")  # type: ignore[arg-type]
    return np.lib.stride_tricks.as_strided(numbers, size, [stride * width for stride in strides])
