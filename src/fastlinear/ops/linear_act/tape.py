"""Training calls of linear_act as the compiled fast path records them: one node."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node, recorded
from fastlinear.ops.linear_act.autograd import Formula

NAME = "LinearActBackward"
_DX, _DW = 1, 2  # gradients as bits: x is read for dW, the weight for dx
_KEPT = {"none": (), "output": (fastpath_node.OUTPUT,), "pre": (fastpath_node.HIDDEN,)}


def node(formula: Formula, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The table's plan for such calls, which have run. None while there is no library of nodes, or
    where the bias is not dense: autograd's formula takes dense ones."""
    if bias is not None and not bias.is_contiguous():
        return None
    kept = _KEPT[formula.saved]
    return recorded.node(NAME, formula, (x, weight, bias), kept, (_DW, _DX, 0))
