"""The matrix products of gated_mlp as those of single layers, by what linear_act takes for them.

On a GPU there are often better products than PyTorch's, of float32, of few rows or of odd sizes;
which they are linear_act knows, by its predictions and the user's tuning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.calls import is_captured
from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.select import select
from fastlinear.families.gated.products import PYTORCH, Products
from fastlinear.families.gated.stacking import Biases, Pre, Weights
from fastlinear.families.linear import problem as linear_act
from fastlinear.families.linear import reference

_MAX_PLANS = 1024
_plans: dict[Any, Callable[..., Any]] = {}
cache.on_change(_plans.clear)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, x (M, K), weight (N, K), bias (N,) or None."""
    y: Tensor = _piece("forward", x, weight, bias)(x, weight, bias, "none", False)[0]
    return y


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dpre W, dpre (M, N), weight (N, K)."""
    dx: Tensor = _piece("grad_input", dpre, weight)(dpre, weight)
    return dx


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dpreᵀ x, dpre (M, N), x (M, K)."""
    dw: Tensor = _piece("grad_weight", dpre, x)(dpre, x)
    return dw


def accumulated(dpre: Tensor, weight: Tensor, dx: Tensor) -> Tensor:
    """dx + dpre W in the memory of dx, dpre (M, N), weight (N, K)."""
    run = _piece("grad_input", dpre, weight)
    own = run is reference.grad_input
    return dx.addmm_(dpre, weight) if own else dx.add_(run(dpre, weight))


def pre_activations(x: Tensor, weights: Weights, biases: Biases) -> Pre:
    """x Wgᵀ + bg and x Wuᵀ + bu, or their stack and None."""
    first = forward(x, weights.gate, biases.gate)
    return first, None if weights.up is None else forward(x, weights.up, biases.up)


LAYERS = Products(
    pre_activations=pre_activations,
    forward=forward,
    grad_input=grad_input,
    grad_weight=grad_weight,
    accumulated=accumulated,
)


def products_for(x: Tensor) -> Products:
    """linear_act's on a GPU; PyTorch's where kernels are interpreted."""
    return LAYERS if x.is_cuda else PYTORCH


def _piece(
    piece: str, first: Tensor, second: Tensor, bias: Tensor | None = None
) -> Callable[..., Any]:
    """linear_act's function for a piece on such tensors, in the order of the functions above."""
    sizes = first.shape, second.shape, first.stride(), second.stride(), bias is None
    facts = first.dtype, first.device, is_captured(first), matmul_precision(first.dtype)
    key = (piece, *sizes, *facts)
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        with torch.cuda.device(first.device):
            p = _problem(piece, first, second, bias)
            found = _plans[key] = select(p).load()
    return found


def _problem(piece: str, first: Tensor, second: Tensor, bias: Tensor | None) -> Problem:
    weight = None if piece == "grad_weight" else second
    x = second if piece == "grad_weight" else first if piece == "forward" else None
    m = first.shape[0]
    n = first.shape[1] if piece != "forward" else second.shape[0]
    k = second.shape[1]
    layout = "nk"
    if weight is not None and not weight.is_contiguous():
        layout = "kn" if weight.t().is_contiguous() else "strided"
    return linear_act.problem(
        *(piece, m, k, n),
        dtype=DTYPE_NAMES[first.dtype],
        device="cuda",
        bias=bias is not None,
        needs_grad=piece != "forward",
        x_layout="rows" if x is None else linear_act.x_layout_of(x),
        w_layout=layout,
        precision=matmul_precision(first.dtype),
        captured=is_captured(first),
    )
