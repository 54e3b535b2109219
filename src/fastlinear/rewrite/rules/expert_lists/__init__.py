"""The rule of lists of experts: equal modules of one list on rows of their own, as findings.

Which rows go where is decided in a run, so nothing is rewritten.
"""

from fastlinear.rewrite.rules.expert_lists.report import findings

FAMILY = "grouped_linear"

__all__ = ["FAMILY", "findings"]
