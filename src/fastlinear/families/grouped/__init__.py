"""y_g = act(x_g W_gᵀ + b_g) for every group g, forward and backward."""

from fastlinear.families.grouped import backends as _backends
from fastlinear.families.grouped import registered as _registered
from fastlinear.families.grouped.op import explain, grouped_linear

__all__ = ["explain", "grouped_linear"]

del _backends, _registered
