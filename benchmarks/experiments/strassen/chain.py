"""The asymmetric fused chain: 7 products of halves in place of 8.

For L layers: L + 1 pointwise passes and L batched products. A pointwise pass is the suffix of one
layer's product, bias, activation and the prefix of the next layer's, so activations cross memory
only as the planes that the batched product reads and writes. See README.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.strassen.scheme import Scheme
from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.select import select
from fastlinear.families.mlp.autograd import Formula, Mlp
from fastlinear.families.mlp.problem import layer_activations, widths_of
from fastlinear.families.mlp.selection import problem_of
from fastlinear.families.mlp.validation import sequences, validate

Biases = tuple[Tensor | None, ...]

# (device, kind of product) → levels, and from how many rows and from which width on they pay,
# measured on an H200. Under TF32 and on CPUs nothing was gained; 16 bits cannot afford two levels.
_PAYS_FROM = {
    ("cuda", "float32"): (2, 1024, 2048),
    ("cuda", "half"): (1, 16384, 8192),
}


def reason_not(p: Problem) -> str | None:
    """Why the Strassen chain cannot serve a forward Problem, or None."""
    if p.dtype not in ("float32", "bfloat16", "float16"):
        return f"no Strassen chain for {p.dtype}"
    if p.dim("M") < 1 or min(widths_of(p)) < 1:
        return "an empty matrix has no blocks"
    if p.device == "cuda":
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if torch.cuda.get_device_capability() < (8, 0):
            return "its kernels need compute capability 8.0"
        return None
    return None if p.device == "cpu" else f"no Strassen chain on {p.device}"


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    activation: str = "relu",
    final_activation: str = "none",
) -> Tensor:
    """``fastlinear.mlp`` by Strassen's scheme, with gradients where they are asked for.

    The forward keeps what the backward reads. The backward's products are classical, by the backend
    that fastlinear takes for it.

    Args:
        x: (..., n_0); float32, bfloat16 or float16, on a CPU or a CUDA device.
        weights: L tensors (n_{i+1}, n_i) in the dtype and on the device of x.
        biases: L tensors (n_{i+1},) or None, or None for no bias anywhere.
        activation: after every layer but the last.
        final_activation: after the last layer.

    Returns:
        (..., n_L) in the dtype of x. Norm-wise accurate only; see README.md.

    Raises:
        InputError: as ``fastlinear.mlp``.
        ValueError: an empty matrix, or a dtype or device without kernels.
    """
    ws, bs = sequences(weights, biases)
    validate(x, ws, bs, activation, final_activation)
    names = activation, final_activation
    given = (x, *ws, *(b for b in bs if b is not None))
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    p = problem_of(x, ws, bs, *names, grad)
    if (why := reason_not(p)) is not None:
        raise ValueError(why)
    bs = tuple(None if b is None else b.contiguous() for b in bs)
    if grad:
        formula = Formula(*names, len(ws), forward, _backward(p.with_piece("backward")))
        result: Tensor = Mlp.apply(formula, x, *ws, *bs)
        return result
    rows = x.reshape(-1, x.shape[-1])
    return forward(rows, ws, bs, *names, False)[0].view(*x.shape[:-1], ws[-1].shape[0])


@lru_cache(maxsize=1024)
def _backward(p: Problem) -> Callable[..., Any]:
    """The classical backward that fastlinear takes for a backward Problem."""
    return select(p).load()


def forward(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(y, saved) of the chain h ← act(h Wᵀ + b), products by Strassen's scheme.

    x (M, n_0), weights (n_{i+1}, n_i), biases (n_{i+1},) or None, any strides; y (M, n_L) and
    saved[i] (M, n_{i+1}) contiguous, in the dtype of x. Deterministic; norm-wise accurate.
    """
    scheme = Scheme("strassen", _levels(x, weights))
    return _run(x, weights, biases, activation, final_activation, save, scheme)


def forward_classical(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The control of the benchmarks: as ``forward``, with the 8 classical products of the blocks.

    The same cut, passes and batched product; what differs in time from ``forward`` is Strassen's.
    """
    scheme = Scheme("classical", _levels(x, weights))
    return _run(x, weights, biases, activation, final_activation, save, scheme)


def levels_for(m: int, widths: Sequence[int], dtype: str, device: str, precision: str) -> int:
    """Levels with which the chain was measured to beat fused classical layers; 0: with none."""
    kind = dtype if dtype == "float32" and precision == "highest" else _kind(dtype)
    levels, rows, width = _PAYS_FROM.get((device, kind), (0, 0, 0))
    return levels if m >= rows and min(widths) >= width else 0


def pays(p: Problem) -> bool:
    """Whether the chain was measured to beat fused classical layers around a forward Problem."""
    return levels_for(p.dim("M"), widths_of(p), p.dtype, p.device, p.precision) > 0


def _kind(dtype: str) -> str:
    return "half" if dtype in ("bfloat16", "float16") else "tf32"


def _levels(x: Tensor, weights: tuple[Tensor, ...]) -> int:
    """Levels of a chain that is to run by Strassen whatever it gains: at least 1."""
    widths = (x.shape[1], *(w.shape[0] for w in weights))
    name, precision = DTYPE_NAMES[x.dtype], matmul_precision(x.dtype)
    return max(1, levels_for(x.shape[0], widths, name, x.device.type, precision))


def _run(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
    scheme: Scheme,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    names = layer_activations(len(weights), activation, final_activation)
    with torch.no_grad():
        if x.is_cuda:
            from benchmarks.experiments.strassen import gpu

            return gpu.run(x, weights, biases, names, save, scheme)
        from benchmarks.experiments.strassen import cpu

        return cpu.run(x, weights, biases, names, save, scheme)
