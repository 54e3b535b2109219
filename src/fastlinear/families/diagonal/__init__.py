"""y = act(x ∘ w + b) + r: a linear layer whose weight is a diagonal, forward and backward."""

from fastlinear.families.diagonal import registered as _registered
from fastlinear.families.diagonal.op import diagonal_linear, explain

__all__ = ["diagonal_linear", "explain"]

del _registered
