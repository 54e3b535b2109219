"""The rule of experts: stacked experts as transformers has them, as one call of ``experts``."""

from fastlinear.rewrite.rules.experts.find import find, findings

FAMILY = "experts"
NAMES = ("experts",)

__all__ = ["FAMILY", "NAMES", "find", "findings"]
