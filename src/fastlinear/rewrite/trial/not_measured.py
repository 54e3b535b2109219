"""Findings that nothing was measured of: told with the reason, rather than left out."""

from __future__ import annotations

from typing import Any

from fastlinear.profile.records import Finding
from fastlinear.rewrite.work import Work


def budget_spent(work: Work) -> str:
    """The reason where there was no time left."""
    seconds = f"{work.config.time_budget_s:g} s"
    return f"the time budget of {seconds} was spent before it; a larger time_budget_s reaches it"


def not_measured(
    code: str, fqn: str, title: str, words: str, why: str, details: dict[str, Any]
) -> Finding:
    """A finding without numbers: ``words`` say what was seen, ``why`` why it was not measured."""
    return Finding.untimed(
        code=code,
        fqn=fqn,
        title=title,
        message=f"{words}: not measured: {why}.",
        details={**details, "not_measured": why},
    )
