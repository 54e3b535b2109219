"""h_{i+1} = act_i(h_i W_iᵀ + b_i): a chain of linear layers as one operation."""

from fastlinear.families.mlp import inference_op as _inference_op
from fastlinear.families.mlp import registered as _registered
from fastlinear.families.mlp.op import explain, mlp

__all__ = ["explain", "mlp"]

del _inference_op, _registered
