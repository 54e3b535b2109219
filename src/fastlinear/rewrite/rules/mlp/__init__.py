"""The rule of mlp: runs of linears with activations between them, as one call."""

from fastlinear.rewrite.rules.mlp.find import find
from fastlinear.rewrite.rules.mlp.report import findings

FAMILY = "mlp"

__all__ = ["FAMILY", "find", "findings"]
