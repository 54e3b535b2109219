"""The rule of diagonal_linear: modules and sequences of ops that scale every feature by a number
of its own. It is left to the reader to put one call in their place."""

from fastlinear.rewrite.rules.diagonal.find import find

FAMILY = "diagonal_linear"
NAMES = ("diagonal_linear",)
REWRITES = False

__all__ = ["FAMILY", "NAMES", "REWRITES", "find"]
