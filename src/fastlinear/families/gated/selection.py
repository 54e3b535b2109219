"""From a call's tensors to its Problem, and from there to the backend of each piece."""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.calls import facts_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import backward_choice, choices_of, select_pieces
from fastlinear.families.gated.problem import problem
from fastlinear.families.gated.stacking import Biases, Weights, hidden

__all__ = ["backward_choice", "choices_of", "problem_of", "select_pieces"]


def problem_of(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    recompute: int | None,
    needs_grad: bool,
) -> Problem:
    """The forward Problem of a call; x is (M, K)."""
    m, k = x.shape
    given = [w for w in weights if w is not None]
    held = [b is not None for b, w in zip(biases, weights, strict=True) if w is not None]
    return problem(
        "forward",
        m,
        k,
        hidden(weights),
        0 if weights.down is None else weights.down.shape[0],
        activation=activation,
        bias="yes" if all(held) else "some" if any(held) else "no",
        needs_grad=needs_grad,
        order=order,
        recompute=needs_grad and recompute == 1,
        x="dense" if x.is_contiguous() else "strided",
        w="dense" if all(w.is_contiguous() for w in given) else "strided",
        **facts_of(x),
    )
