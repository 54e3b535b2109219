"""y_g = act(x_g W_gᵀ + b_g) for every group g, forward and backward."""

from fastlinear.ops.grouped_linear import backends as _backends
from fastlinear.ops.grouped_linear import ragged_registered as _ragged_registered
from fastlinear.ops.grouped_linear import registered as _registered
from fastlinear.ops.grouped_linear.op import explain, grouped_linear
from fastlinear.ops.grouped_linear.ragged import ragged_linear
from fastlinear.ops.grouped_linear.unequal import unequal_linear

__all__ = ["explain", "grouped_linear", "ragged_linear", "unequal_linear"]

del _backends, _ragged_registered, _registered
