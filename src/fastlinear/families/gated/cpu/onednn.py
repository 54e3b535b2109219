"""Backend ``onednn`` on the CPU, float32 and bfloat16.

Inference: two products whose epilogues hold all that is elementwise — bias and activation in the
gate's, bias and the product with the gate in the up projection's — so that nothing passes over
memory in between. Training: products that give the pre-activations, and one pass of our own each
way (``gate.cpp``) for all that lies between them.

oneDNN's relu makes 0 of NaN where torch's keeps it, so relu is a pass of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.families.gated.cpu import gate as cpp_gate
from fastlinear.families.gated.products import Gate, Products, backward_by
from fastlinear.families.gated.stacking import (
    Biases,
    Gradients,
    Needs,
    Pre,
    Weights,
    split_biases,
    split_weights,
)
from fastlinear.families.linear.cpu import onednn as products


def reason_not(problem: Problem) -> str | None:
    """Why oneDNN cannot serve a Problem of any piece, or None. Compiles nothing."""
    if problem.dtype not in ("float32", "bfloat16"):
        return f"float32 and bfloat16 only, not {problem.dtype}"
    why = products.reason_not(problem)
    if why is None and not hasattr(torch.ops.mkldnn._linear_pointwise, "binary"):
        return "this build of torch lacks mkldnn._linear_pointwise.binary"
    trains = problem.piece != "forward" or problem.needs_grad
    return why or (cpp_gate.reason_not() if trains else None)


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) → (y (M, N) or (M, H), then the pre-activations or None twice)."""
    if not save_pre:
        return _inference(x, weights, biases, activation, order), None, None
    pre = _pre_activations(x, weights, biases)
    h = cpp_gate.forward(pre, activation, order)
    if weights.down is None:
        return h, *pre
    return products.forward(h, weights.down, biases.down, "none", False)[0], *pre


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
    return backward_by(_ONEDNN, gate, dy, pre, x, weights, biases, activation, order, needs, over)


def _inference(x: Tensor, weights: Weights, biases: Biases, activation: str, order: str) -> Tensor:
    x = products.plain(x)  # of other strides oneDNN multiplies number by number
    (gate, up), (gate_bias, up_bias) = split_weights(weights, order), split_biases(biases, order)
    opened = products.product(x, products.dense(gate), gate_bias, activation, False)[0]
    bias = None if up_bias is None else up_bias.contiguous()
    multiply = torch.ops.mkldnn._linear_pointwise.binary
    h: Tensor = multiply(x, opened, products.dense(up), bias, "mul")
    del opened
    if weights.down is None:
        return h
    return products.product(h, products.dense(weights.down), biases.down, "none", False)[0]


def _pre_activations(x: Tensor, weights: Weights, biases: Biases) -> Pre:
    x = products.plain(x)
    first = products.forward(x, weights.gate, biases.gate, "none", False)[0]
    if weights.up is None:
        return first, None
    return first, products.forward(x, weights.up, biases.up, "none", False)[0]


def _accumulated(dpre: Tensor, weight: Tensor, dx: Tensor) -> Tensor:
    """dx + dpre W, in the product's epilogue."""
    w = products.dense(weight).t()
    found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(dpre, dx, w, None, "add")
    return found


_ONEDNN = Products(
    pre_activations=_pre_activations,
    forward=lambda x, weight, bias: products.forward(x, weight, bias, "none", False)[0],
    grad_input=products.grad_input,
    grad_weight=products.grad_weight,
    accumulated=_accumulated,
)
