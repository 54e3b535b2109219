"""Calls of unequal_linear as the compiled fast path runs and records them: one node for all
groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node, recorded
from fastlinear.ops.unequal_linear import layout
from fastlinear.ops.unequal_linear.autograd import Formula, Maybe

NAME = "UnequalLinearBackward"
_KEEPS = {
    "none": fastpath_node.NOTHING,
    "output": fastpath_node.OUTPUT,
    "pre": fastpath_node.INTERNAL,
}


def plan(
    formula: Formula,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Maybe | None,
    grad: bool,
) -> Any:
    """The fast path's plan for such calls, which have run; None while there is no library of
    nodes."""
    if any(t is not None and t.is_neg() for t in (*xs, *weights, *(biases or ()))):
        return None
    sizes = layout.sizes_of(xs, weights)
    return recorded.lists(
        NAME,
        len(xs),
        (xs, weights, biases),
        formula.forward if grad else formula.inference,
        partial(formula.gradients, sizes=sizes) if grad else None,
        _KEEPS[formula.keeps] if grad else fastpath_node.NOTHING,
    )
