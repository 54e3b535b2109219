"""gated_mlp in plain PyTorch: the readable oracle, and the backend ``eager``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.gated.stacking import (
    Biases,
    Gradients,
    Needs,
    Pre,
    Weights,
    empty_like,
    split_pre,
)


def gated_mlp(x: Tensor, weights: Weights, biases: Biases, activation: str, order: str) -> Tensor:
    """(act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu)) Wdᵀ + bd, differentiable; x (..., K) → (..., N).

    Without a down weight the product itself, (..., H).
    """
    gate, up = split_pre(pre_activations(x, weights, biases), order)
    hidden = activation_of(activation).value(gate) * up
    return hidden if weights.down is None else F.linear(hidden, weights.down, biases.down)


def pre_activations(x: Tensor, weights: Weights, biases: Biases) -> Pre:
    """x (..., K) → gate and up (..., H) each, or both (..., 2H) where the weights are stacked."""
    first = F.linear(x, weights.gate, biases.gate)
    return first, None if weights.up is None else F.linear(x, weights.up, biases.up)


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) → (y (M, N) or (M, H), then the pre-activations or None twice)."""
    pre = pre_activations(x, weights, biases)
    gate, up = split_pre(pre, order)
    hidden = activation_of(activation).value(gate) * up
    y = hidden if weights.down is None else F.linear(hidden, weights.down, biases.down)
    return (y, *pre) if save_pre else (y, None, None)


def backward(
    dy: Tensor,
    pre: Pre | None,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    needs: Needs,
    over: bool = False,
) -> Gradients:
    """dy (M, N) or (M, H) → the seven gradients; the pre-activations are formed again where pre is
    None, and written over where ``over`` allows it."""
    inner = any(needs[i] for i in (0, 1, 2, 4, 5))
    act = activation_of(activation)
    down_weight = down_bias = None
    dh = dy
    if pre is None and (inner or needs[3]):
        pre, over = pre_activations(x, weights, biases), True
    if weights.down is not None:
        dh = dy @ weights.down if inner else dy
        down_bias = dy.sum(0) if needs[6] else None
    if pre is None:
        return None, None, None, None, None, None, down_bias
    gate, up = split_pre(pre, order)
    activated = act.value(gate)
    if weights.down is not None and needs[3]:
        down_weight = dy.t() @ (activated * up)
    if not inner:
        return None, None, None, down_weight, None, None, down_bias
    dpre = pre if over else empty_like(pre)
    dgate, dup = split_pre(dpre, order)
    through = act.backward(dh * up, activated if act.saved == "output" else gate)
    torch.mul(dh, activated, out=dup)
    dgate.copy_(through)
    del through, activated, dh
    return (
        *_through_products(dpre, x, weights, order, needs),
        down_weight,
        *(d.sum(0) if need and d is not None else None for d, need in _bias_pairs(dpre, needs)),
        down_bias,
    )


def _through_products(
    dpre: Pre, x: Tensor, weights: Weights, order: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, gate's dW, up's dW)."""
    first, second = dpre
    dx = None
    if needs[0]:
        dx = first @ weights.gate
        if second is not None and weights.up is not None:
            dx = dx + second @ weights.up
    gate_weight = first.t() @ x if needs[1] else None
    up_weight = second.t() @ x if needs[2] and second is not None else None
    return dx, gate_weight, up_weight


def _bias_pairs(dpre: Pre, needs: Needs) -> tuple[tuple[Tensor | None, bool], ...]:
    return (dpre[0], needs[4]), (dpre[1], needs[5])
