"""Drop-in modules, one a family."""

from fastlinear.nn.linear import Linear

__all__ = ["Linear"]
