"""What a rewrite rule says of a model: findings, and whose gain each of them claims."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fastlinear.core.timing import Ratio
from fastlinear.profile.records import Finding

OFFERED = "optimize_ puts it in place by itself where the step gains"
_INSIDE = "linear_activation", "grouped_linear", "not_followed"
"""Codes of what one call of more computes as well."""


@dataclass(frozen=True)
class Told:
    """A finding of a rule.

    Attributes:
        finding: it.
        covers: linears that its call computes: what other findings say to gain on nothing but
            these is part of its gain.
    """

    finding: Finding
    covers: tuple[str, ...] = ()


def covered(findings: Iterable[Finding], by: Iterable[Told]) -> list[Finding]:
    """``findings``, of which each gain is claimed once."""
    found = list(findings)
    for told in by:
        if told.covers:
            others = (f for f in found if f.code != told.finding.code)
            inside = {id(f) for f in others if f.code in _INSIDE and within(f, told.covers)}
            found = [part_of(f, told.finding) if id(f) in inside else f for f in found]
    return found


def within(f: Finding, linears: Collection[str]) -> bool:
    """Whether it is about nothing but these linears, and claims its gain."""
    return f.part_of is None and set(f.details.get("linears", [f.fqn])) <= set(linears)


def part_of(f: Finding, by: Finding) -> Finding:
    """A finding whose gain another one claims."""
    text = f"Part of the {by.title}, in {by.fqn or 'the model'}: its gain is counted there."
    details = {k: v for k, v in f.details.items() if k != "advice"} | {"part_of": by.fqn}
    return replace(f, predicted_gain_us=0.0, message=f"{f.message} {text}", details=details)


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


def in_words(ratio: Ratio) -> str:
    """A speed-up with its 95% interval."""
    return f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
