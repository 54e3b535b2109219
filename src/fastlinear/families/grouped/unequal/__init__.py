"""y_g = act(x_g W_gᵀ + b_g) for linears of different sizes, as one operation."""

from fastlinear.families.grouped.unequal.op import explain, unequal_linear

__all__ = ["explain", "unequal_linear"]
