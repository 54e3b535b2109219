"""Backend ``batch_invariant`` of gated_mlp: products whose rows do not depend on each other, and a
pass of our own for the gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.families.gated.cpu import gate as cpp_gate
from fastlinear.families.gated.products import PYTORCH, Products, forward_by
from fastlinear.families.gated.stacking import Biases, Pre, Weights
from fastlinear.families.linear import batch_invariant as layers


def reason_not(p: Problem) -> str | None:
    """Why it cannot serve a Problem, or None."""
    return layers.reason_not(p) or (cpp_gate.reason_not() if p.device == "cpu" else None)


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) → (y (M, N) or (M, H), then the pre-activations or None twice)."""
    return forward_by(_PRODUCTS, _gate(x), x, weights, biases, activation, order, save_pre)


def _gate(x: Tensor) -> Callable[..., Tensor]:
    if not x.is_cuda:
        return cpp_gate.forward if x.dtype is torch.float32 else _in_float32
    from fastlinear.families.gated.triton.backend import gate_forward

    return gate_forward


def _in_float32(pre: Pre, activation: str, order: str, over: bool = False) -> Tensor:
    gate, up = pre
    wide = gate.float(), None if up is None else up.float()
    return cpp_gate.forward(wide, activation, order, True).to(gate.dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()
    return layers.forward(x, weight, bias, "none", False)[0]


def _pre_activations(x: Tensor, weights: Weights, biases: Biases) -> Pre:
    first = _product(x, weights.gate, biases.gate)
    return first, None if weights.up is None else _product(x, weights.up, biases.up)


_PRODUCTS = Products(
    pre_activations=_pre_activations,
    forward=_product,
    grad_input=PYTORCH.grad_input,
    grad_weight=PYTORCH.grad_weight,
    accumulated=PYTORCH.accumulated,
)
