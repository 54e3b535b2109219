"""From a call's tensors to its Problem, and from there to the backend of each piece."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlinear.core.calls import facts_of
from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import behind, choices_of, select_pieces
from fastlinear.families.mlp import backends, layerwise
from fastlinear.families.mlp.problem import LOOPS, STEP, x_layout_of

__all__ = ["choices_of", "problem_of", "select_pieces", "tuning_order"]


def tuning_order(p: Problem) -> tuple[Problem, ...]:
    """All Problems that decide about a forward Problem, in the order in which to tune them: first
    those of linear_act that its layers are, since ``layerwise`` stands on their choices."""
    layers = layerwise.layer_problems(p) if layerwise.reason_not(p) is None else ()
    forward = p.with_piece("forward")
    if not p.needs_grad:
        return (*layers, forward)
    # which backward is asked for depends on what the forward turns out to be
    backwards = dict.fromkeys((p.with_piece("backward"), behind(forward, LOOPS[0])))
    return (*layers, forward, *backwards, p.with_piece(STEP))


def problem_of(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
    needs_grad: bool,
) -> Problem:
    """The forward Problem of a call; the arguments are valid."""
    m, k = x.shape[:-1].numel(), x.shape[-1]
    rows = x.detach().reshape(m, k) if x.numel() else x.new_empty(m, k)
    given = sum(b is not None for b in biases)
    return backends.problem(
        "forward",
        m,
        (k, *(w.shape[0] for w in weights)),
        activation=activation,
        final_activation=final_activation,
        bias="no" if given == 0 else "yes" if given == len(biases) else "some",
        needs_grad=needs_grad,
        x_layout=x_layout_of(rows),
        w_layout="nk" if all(w.is_contiguous() for w in weights) else "mixed",
        **facts_of(x),
    )
