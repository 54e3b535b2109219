"""Calls of grouped_linear as the compiled fast path runs and records them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node, recorded
from fastlinear.ops.grouped_linear.autograd import Formula
from fastlinear.ops.grouped_linear.sign_mask import SIGNS

NAME = "GroupedLinearBackward"
_KEPT = {
    "none": (),
    "output": (fastpath_node.OUTPUT,),
    "pre": (fastpath_node.INTERNAL,),
    SIGNS: (fastpath_node.INTERNAL,),
}
_READERS = (-1, -1, -1)  # all are kept: second derivatives start from them


def node(formula: Formula, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The fast path's plan for such training calls, which have run; None while there is no library
    of nodes."""
    return recorded.node(NAME, formula, (x, weight, bias), _KEPT[formula.saved], _READERS)
