"""y = act(x ∘ w + b) + r: a linear layer whose weight is a diagonal, forward and backward."""

from fastlinear.ops.common import door as _door
from fastlinear.ops.common import door_node as _door_node
from fastlinear.ops.diagonal_linear import op as _op
from fastlinear.ops.diagonal_linear import registered as _registered
from fastlinear.ops.diagonal_linear.op import diagonal_linear, explain

__all__ = ["diagonal_linear", "explain"]

_door.on_ready(_op._plans.clear)  # plans seen before are made anew, and the door told of them
_door_node.on_ready(_op._forget)  # what it runs by Python has a better plan

del _door, _door_node, _op, _registered
