"""y = act(x Wᵀ + b), forward and backward."""

from fastlinear.ops.common import door as _door
from fastlinear.ops.linear_act import inference_op as _inference_op
from fastlinear.ops.linear_act import op as _op
from fastlinear.ops.linear_act import registered as _registered
from fastlinear.ops.linear_act.op import explain, linear_act

__all__ = ["explain", "linear_act"]

_door.on_ready(_op._plans.clear)  # plans seen before are made anew, and the door told of them

del _door, _inference_op, _op, _registered
