"""The rule of experts: equal modules of one list on rows of their own, as findings.

Which rows go where is decided in a run, so nothing is rewritten.
"""

from fastlinear.rewrite.rules.experts.report import findings

FAMILY = "grouped_linear"

__all__ = ["FAMILY", "findings"]
