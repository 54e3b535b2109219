"""The readable torch-only oracle of linear_act: what every backend must compute.

In float64 it is the oracle; in the caller's dtype it is PyTorch's own path (backend ``eager``).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """act(x Wᵀ + b) by differentiable torch ops; x (..., K), weight (N, K) → (..., N)."""
    return activation_of(activation).value(F.linear(x, weight, bias))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (M, K), weight (N, K), bias (N,) → y (M, N) and, if asked, pre (M, N)."""
    act, pre = activation_of(activation), F.linear(x, weight, bias)
    return (act.value(pre), pre) if save_pre else (act.over(pre), None)


def grad_pre(
    dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """(dpre, db): dpre = dy * act'(pre), both (M, N); db = dpre summed over M, (N,)."""
    dpre = dy if saved is None else activation_of(activation).backward(dy, saved)
    return dpre, dpre.sum(0) if need_bias_grad else None


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) @ weight (N, K)."""
    return dpre @ weight


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) @ x (M, K)."""
    return dpre.t() @ x


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dW, db), each None where not needed: the three pieces above in a row.

    x may be None where dW is not needed, weight where dx is not.
    """
    dpre, db = grad_pre(dy, saved, activation, needs[2])
    dx = grad_input(dpre, weight) if needs[0] and weight is not None else None
    dw = grad_weight(dpre, x) if needs[1] and x is not None else None
    return dx, dw, db
