"""y = act(x Wᵀ + b), forward and backward."""

from fastlinear.ops.linear_act import inference_op as _inference_op
from fastlinear.ops.linear_act import registered as _registered
from fastlinear.ops.linear_act.op import explain, linear_act

__all__ = ["explain", "linear_act"]

del _inference_op, _registered
