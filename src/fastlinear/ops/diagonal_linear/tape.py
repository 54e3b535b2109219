"""Calls of diagonal_linear as the compiled fast path runs and records them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node, recorded
from fastlinear.ops.diagonal_linear.autograd import Formula, Rest

NAME = "DiagonalLinearBackward"


def node(formula: Formula, x: Tensor, weight: Tensor, rest: Rest) -> Any:
    """The fast path's plan for such training calls, which have run. None while there is no library
    of nodes, or where a parameter is not dense: autograd's formula takes dense ones."""
    if not all(t is None or t.is_contiguous() for t in (weight, rest[0])):
        return None
    kept = (fastpath_node.NOTHING,)
    return recorded.node(NAME, formula, (x, weight, rest), kept, formula.readers)
