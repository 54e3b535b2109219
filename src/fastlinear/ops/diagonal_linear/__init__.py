"""y = act(x ∘ w + b) + r: a linear layer whose weight is a diagonal, forward and backward."""

from fastlinear.ops.diagonal_linear import registered as _registered
from fastlinear.ops.diagonal_linear.op import diagonal_linear, explain

__all__ = ["diagonal_linear", "explain"]

del _registered
