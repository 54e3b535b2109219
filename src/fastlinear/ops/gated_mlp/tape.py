"""Calls of gated_mlp as the compiled fast path runs and records them: one node."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node, recorded
from fastlinear.ops.gated_mlp.autograd import Formula
from fastlinear.ops.gated_mlp.saved_memory import READERS, readers_of_x

NAME = "GatedMLPBackward"
_Three = tuple[Any, Any, Any]


def node(formula: Formula, x: Tensor, weights: _Three, biases: _Three) -> Any:
    """The formula as the compiled fast path records it, for such tensors; None while there is no
    library of nodes. They must have run before."""
    kept = fastpath_node.SPENT if formula.save_pre else fastpath_node.NOTHING
    return recorded.node(
        NAME,
        formula,
        (x, weights, biases),
        (kept, kept if weights[1] is not None else fastpath_node.NOTHING),
        # all are read where any are: second derivatives start from them
        (readers_of_x(formula.save_pre), *(READERS,) * (len(weights) + len(biases))),
        (READERS, READERS),
    )
