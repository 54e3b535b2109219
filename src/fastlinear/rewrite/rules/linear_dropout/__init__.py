"""The rule of linear → dropout in training: dropout with the same random numbers, drawn faster, and
written over the linear's result."""

from fastlinear.rewrite.rules.linear_dropout.find import find

FAMILY = "linear_act"
REWRITES = True

__all__ = ["FAMILY", "REWRITES", "find"]
