"""y_t = act(x_t W_gᵀ + b_g) for rows sorted by group, whose numbers are on the device."""

from fastlinear.families.grouped.ragged import registered as _registered
from fastlinear.families.grouped.ragged.op import explain, ragged_linear

__all__ = ["explain", "ragged_linear"]

del _registered
