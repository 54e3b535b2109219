"""Training calls of mlp as the compiled fast path records them: one node for the whole chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node, recorded
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.mlp.autograd import Formula

NAME = "MlpBackward"
_LAST = {
    "none": fastpath_node.NOTHING,
    "output": fastpath_node.OUTPUT,
    "pre": fastpath_node.INTERNAL,
}


def node(
    formula: Formula,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
) -> Any:
    """The fast path's plan for such calls, which have run; biases are contiguous. None where there
    is no library of nodes, or too many tensors."""
    count = 1 + len(weights) + (1 if biases is None else len(biases))
    if count > fastpath_node.MAX_TENSORS:
        return None
    last = _LAST[activation_of(formula.final_activation).saved]
    kept = (*(fastpath_node.INTERNAL,) * (formula.layers - 1), last)
    # all are kept: second derivatives start from them
    return recorded.node(NAME, formula, (x, weights, biases), kept, (-1,) * count)
