"""The rule of gated_mlp: linears that compute a gated MLP, as one call."""

from fastlinear.rewrite.rules.gated.find import find
from fastlinear.rewrite.rules.gated.report import findings

FAMILY = "gated_mlp"
NAMES = ("gated_mlp",)
AFTER = ("mlp",)

__all__ = ["AFTER", "FAMILY", "NAMES", "find", "findings"]
