"""Drop-in modules, one a family."""

from fastlinear.nn.diagonal import DiagonalLinear
from fastlinear.nn.experts import Experts
from fastlinear.nn.gated import GatedMLP
from fastlinear.nn.grouped import GroupedLinear
from fastlinear.nn.linear import Linear
from fastlinear.nn.mlp import MLP

__all__ = ["MLP", "DiagonalLinear", "Experts", "GatedMLP", "GroupedLinear", "Linear"]
