"""Backend ``half_cpp`` on the CPU: gated MLPs in float16, and of up to 32 tokens in bfloat16.

Each weight comes from memory once, as it lies. In inference gate and up are one pass whose result
is ``h``.
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.families.gated.cpu import gate
from fastlinear.families.gated.stacking import Biases, Pre, Weights, split_biases, split_weights
from fastlinear.kernels.cpu import half


def reason_not(problem: Problem) -> str | None:
    """Why it cannot serve a forward Problem, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if (problem.option("x"), problem.option("w")) != ("dense", "dense"):
        return "x and the weights have to be dense"
    if problem.needs_grad and problem.dtype == "float16":
        return "with gradients bfloat16 only: the gate's own passes have no float16"
    why = half.reason_not(problem.dtype, problem.dim("M"))
    return why or (gate.reason_not() if problem.needs_grad else None)


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) → (y (M, N) or (M, H), then the pre-activations or None twice). Deterministic.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    pre: Pre | tuple[None, None] = (None, None)
    if save_pre:
        first = _layer(x, weights.gate, biases.gate)
        pre = first, None if weights.up is None else _layer(x, weights.up, biases.up)
        h = gate.forward(pre, activation, order)
    else:
        gate_bias, up_bias = split_biases(biases, order)
        if order == "apart":  # whose strides may differ
            gate_bias, up_bias = (None if b is None else b.contiguous() for b in biases[:2])
        both = split_weights(weights, order)
        h = half.gated(x, *both, gate_bias, up_bias, activation)
    y = h if weights.down is None else _layer(h, weights.down, biases.down)
    return y, *pre


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return half.layer(x, weight, bias, "none", False)[0]
