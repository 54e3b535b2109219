"""Calls of ragged_linear as the compiled fast path runs and records them.

Sizes are read at every call: on the device, or by the C++ function, which turns a call with bad
ones down, so that Python says what is wrong.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node, recorded
from fastlinear.ops.ragged_linear.formula import Formula, More

NAME = "RaggedLinearBackward"
_KEPT = {"none": (), "output": (fastpath_node.OUTPUT,), "pre": (fastpath_node.INTERNAL,)}
_ALL = -1  # gradients that a tensor is kept for: second derivatives start from all of them


def node(formula: Formula, x: Tensor, weight: Tensor, more: More) -> Any:
    """The fast path's plan for such training calls, which have run; None while there is no library
    of nodes."""
    own = (fastpath_node.INTERNAL,) if formula.keeps_sizes else ()
    return recorded.node(
        NAME,
        formula,
        (x, weight, more),
        (*own, *_KEPT[formula.saved]),
        (_ALL, _ALL, 0 if formula.keeps_sizes else _ALL, _ALL),
    )


def inference(formula: Formula, x: Tensor, weight: Tensor, more: More) -> Any:
    """The fast path's plan for such calls without gradients, which have run; None where the formula
    runs them."""
    return recorded.inference(formula.inference, x, weight, more)
