"""y_g = act(x_g W_gᵀ + b_g) for every group g, forward and backward."""

from fastlinear.ops.grouped_linear import backends as _backends
from fastlinear.ops.grouped_linear import registered as _registered
from fastlinear.ops.grouped_linear.op import explain, grouped_linear

__all__ = ["explain", "grouped_linear"]

del _backends, _registered
