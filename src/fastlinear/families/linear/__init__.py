"""y = act(x Wᵀ + b), forward and backward."""

from fastlinear.families.linear import inference_op as _inference_op
from fastlinear.families.linear import registered as _registered
from fastlinear.families.linear.op import explain, linear_act

__all__ = ["explain", "linear_act"]

del _inference_op, _registered
