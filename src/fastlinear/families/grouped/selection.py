"""From a call's tensors to its Problem, and from there to the backend of each piece."""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.calls import facts_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import backward_choice, choices_of, select_pieces
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.problem import problem

__all__ = ["backward_choice", "choices_of", "problem_of", "select_pieces"]


def problem_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, order: str, needs_grad: bool
) -> Problem:
    """The forward Problem of a call; x is (B, L, G, K)."""
    batch, length, groups, k = x.shape
    return problem(
        "forward",
        batch * length,
        groups,
        k,
        weight.shape[1],
        activation=activation,
        bias=bias is not None,
        needs_grad=needs_grad,
        order=order,
        length=length,
        x="dense" if layouts.is_dense(x, order) else "strided",
        w="dense" if weight.is_contiguous() else "strided",
        **facts_of(x),
    )
