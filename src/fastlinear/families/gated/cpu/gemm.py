"""Backend ``gemm_cpp`` on the CPU, float32: our own products, and one pass of our own each way
(``gate.cpp``) for all that lies between them."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.families.gated.cpu import gate as cpp_gate
from fastlinear.families.gated.products import Gate, Products, backward_by, forward_by
from fastlinear.families.gated.stacking import Biases, Gradients, Needs, Pre, Weights
from fastlinear.families.linear.cpu import gemm as products


def reason_not(problem: Problem) -> str | None:
    """Why it cannot serve a Problem of any piece, or None. Compiles nothing."""
    if problem.device == "cpu" and problem.dtype != "float32":
        return f"float32 only, not {problem.dtype}"
    return products.reason_not(problem) or cpp_gate.reason_not()


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) → (y (M, N) or (M, H), then the pre-activations or None twice)."""
    return forward_by(_OWN, cpp_gate.forward, x, weights, biases, activation, order, save_pre)


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
    """dy (M, N) or (M, H), dense → the seven gradients; pre None is formed again from x.

    ``over`` allows to write over pre.
    """
    gate = Gate(cpp_gate.forward, cpp_gate.backward)
    return backward_by(_OWN, gate, dy, pre, x, weights, biases, activation, order, needs, over)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return products.forward(x, weight, bias, "none", False)[0]


def _pre_activations(x: Tensor, weights: Weights, biases: Biases) -> Pre:
    first = _product(x, weights.gate, biases.gate)
    return first, None if weights.up is None else _product(x, weights.up, biases.up)


def _accumulated(dpre: Tensor, weight: Tensor, dx: Tensor) -> Tensor:
    return torch.add(dx, products.grad_input(dpre, weight), out=dx)


_OWN = Products(
    pre_activations=_pre_activations,
    forward=_product,
    grad_input=products.grad_input,
    grad_weight=products.grad_weight,
    accumulated=_accumulated,
)
