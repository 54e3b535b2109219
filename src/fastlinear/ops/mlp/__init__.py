"""h_{i+1} = act_i(h_i W_iᵀ + b_i): a chain of linear layers as one operation."""

from fastlinear.ops.common import door as _door
from fastlinear.ops.mlp import inference_op as _inference_op
from fastlinear.ops.mlp import op as _op
from fastlinear.ops.mlp import registered as _registered
from fastlinear.ops.mlp.op import explain, mlp

__all__ = ["explain", "mlp"]

_door.on_ready(_op._plans.clear)  # plans seen before are made anew, and the door told of them

del _door, _inference_op, _op, _registered
