"""The rule of grouped_linear: linears that do not wait for each other, as one call."""

from fastlinear.rewrite.rules.grouped.find import find
from fastlinear.rewrite.rules.grouped.report import findings
from fastlinear.rewrite.rules.grouped.watch import parts

FAMILY = "grouped_linear"
NAMES = ("grouped_linear", "unequal_linear")
AFTER = ("mlp", "gated")

__all__ = ["AFTER", "FAMILY", "NAMES", "find", "findings", "parts"]
