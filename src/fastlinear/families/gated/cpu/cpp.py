"""Backend ``cpp`` on the CPU, float32 and bfloat16: torch's products, and one pass of our own each
way (``gate.cpp``) for all that lies between them."""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.families.gated.cpu import gate as cpp_gate
from fastlinear.families.gated.products import PYTORCH, Gate, backward_by, forward_by
from fastlinear.families.gated.stacking import Biases, Gradients, Needs, Pre, Weights


def reason_not(problem: Problem) -> str | None:
    """Why the C++ passes cannot serve a Problem of any piece, or None. Compiles nothing."""
    if problem.device != "cpu":
        return "compiled for the CPU only"
    if problem.dtype not in ("float32", "bfloat16"):
        return f"float32 and bfloat16 only, not {problem.dtype}"
    return cpp_gate.reason_not()


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) → (y (M, N) or (M, H), then the pre-activations or None twice)."""
    return forward_by(PYTORCH, cpp_gate.forward, x, weights, biases, activation, order, save_pre)


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
    return backward_by(PYTORCH, gate, dy, pre, x, weights, biases, activation, order, needs, over)
