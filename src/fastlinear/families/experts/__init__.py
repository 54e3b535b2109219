"""A mixture of experts as one op: ``y_t = Σ_j w_tj (gate(x_t W_gate_upᵀ + b) W_downᵀ + b)``."""

from fastlinear.families.experts import registered as _registered
from fastlinear.families.experts.op import experts, explain

__all__ = ["experts", "explain"]

del _registered
