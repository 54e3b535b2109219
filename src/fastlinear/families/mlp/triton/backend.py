"""Backend ``whole`` of mlp in Triton: a chain of narrow Linears in one kernel, sm_80 and later.

Forward: one launch, hidden activations in registers. Backward: one launch for dy → dpre_i → dx, one
for every dW_i and db_i over slices of the rows, one that sums the slices in a fixed order. Weights
are read from where they lie at every call, so a changed weight is seen.

Triton is imported on first use, so this file may be imported for ``reason_not`` alone.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.core.precision import matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_gpu
from fastlinear.families.mlp.problem import widths_of
from fastlinear.families.mlp.reference import Biases, Needs, Weights
from fastlinear.families.mlp.triton.config import WholeConfig
from fastlinear.families.mlp.triton.plans import BackwardPlan, ForwardPlan

__all__ = ["MAX_WIDTH", "WholeConfig", "backward", "forward", "reason_not"]

Tensor = torch.Tensor

MAX_WIDTH = 128
_MAX_PLANS = 1024
_MAX_WIDE_FLOAT32_ROWS = 4096  # measured on an H200: ahead at 64 rows, behind at 65536

_plans: dict[Any, Any] = {}


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve the Problem, or None."""
    if (why := why_no_gpu(p, "triton")) is not None:
        return why
    if p.dtype == "float64":
        return "no kernel for float64"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0 or later"
    widths = widths_of(p)
    if max(widths) > MAX_WIDTH:
        return f"a width of {max(widths)} is more than the {MAX_WIDTH} one kernel holds"
    if min(widths) < 1:
        return "a width of 0"
    if p.dim("M") >= 2**30:
        return "needs fewer than 2^30 rows"
    if p.piece == "backward" and p.option("activation") == "none" and p.dim("L") > 1:
        # Triton 3.6 allots such a kernel too little shared memory, and it reads beyond
        return "a chain without activations between its layers is left to PyTorch's products"
    exact = p.dtype == "float32" and p.precision == "highest"
    if exact and max(widths) > 64 and p.dim("M") > _MAX_WIDE_FLOAT32_ROWS:
        return "float32 layers of more than 64 features are slower than PyTorch's at so many rows"
    return None


def forward(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
    *,
    config: WholeConfig | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h_{i+1} = act_i(h_i W_iᵀ + b_i) for all layers in one kernel, float32 accumulation.

    Args:
        x: (M, n_0) of any strides; float32, bfloat16 or float16.
        weights: per layer (n_{i+1}, n_i), x's dtype; best contiguous, others are copied.
        biases: per layer (n_{i+1},) or None.
        activation, final_activation: names, for hidden layers and the last.
        save: whether to keep what ``backward`` reads.
        config: launch configuration; None picks one.

    Returns:
        y (M, n_L), and per layer (M, n_{i+1}) its pre-activation or output (() unless ``save``).
    """
    x, weights = _rows(x), _contiguous(weights)
    for b in biases:
        if b is not None and not b.is_contiguous():
            biases = tuple([None if t is None else t.contiguous() for t in biases])
            break
    key = (
        *(x.shape, x.stride(0), x.dtype, x.device, activation, final_activation, save, config),
        *(matmul_precision(x.dtype), tuple([w.shape for w in weights])),
        _alignment((x, *weights, *biases)),
    )
    plan = _plans.get(key)
    if plan is None:
        names = (activation, final_activation)
        plan = _remember(key, ForwardPlan(x, weights, biases, names, save, config))
    result: tuple[Tensor, tuple[Tensor, ...]] = plan.run(x, weights, biases)
    return result


def backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    saved: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    needs: Needs,
    *,
    config: WholeConfig | None = None,
) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Gradients of ``forward``: (dx, dWs, dbs), each None where ``needs`` does not ask for it.

    Args:
        dy: (M, n_L) of any strides.
        x, weights: as given to ``forward``.
        saved: as ``forward`` gave it.
        activation, final_activation: names.
        needs: (x, per layer weight, per layer bias).
        config: launch configuration of the data chain; None picks one.

    Accumulates in float32; dWs and dbs are sums over slices of the rows in a fixed order, so
    results are deterministic. Gradients of one call are views of one buffer.
    """
    x, weights = _rows(x), _contiguous(weights)
    dy, saved = dy.contiguous(), _contiguous(saved[: len(weights)])  # others are outputs
    key = (
        *(x.shape, x.stride(0), x.dtype, x.device, activation, final_activation, needs, config),
        *(matmul_precision(x.dtype), tuple([w.shape for w in weights])),
        _alignment((x, dy, *weights, *saved)),
    )
    plan = _plans.get(key)
    if plan is None:
        names = (activation, final_activation)
        plan = _remember(key, BackwardPlan(x, weights, names, needs, config))
    result: tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]
    result = plan.run(dy, x, weights, saved)
    return result


def _remember(key: Any, plan: Any) -> Any:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _contiguous(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    for t in tensors:
        if not t.is_contiguous():
            return tuple([t.contiguous() for t in tensors])
    return tensors


def _alignment(tensors: tuple[Tensor | None, ...]) -> Any:
    """Which tensors are None and how those that are not lie against 16 bytes."""
    bits = 0
    missing = False
    for t in tensors:
        if t is None:
            missing = True
        else:
            bits |= t.data_ptr()
    if bits & 15 == 0 and not missing:
        return 0
    return tuple([None if t is None else t.data_ptr() & 15 for t in tensors])
