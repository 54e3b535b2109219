"""Activations behind linears that could not become part of one call: told, whatever else becomes
of the linear."""

from __future__ import annotations

from dataclasses import replace

from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.site_outcome import SiteOutcome
from fastlinear.rewrite.work import Work

TOLD = "activation left alone: "
_BY_ITS_CODE = ("several_users", "mixed_use")  # sites with an activation that is not all there is
_IN_ITS_FORWARD = ("untraceable", "foreign_caller")
_REMEDY = (
    "nn.Sequential(linear, activation) in its place is fused whatever the code around it does (its "
    "weights' names change)."
)


def in_words(refusal: Refusal) -> str:
    """What stands between a linear and its activation, and what to change."""
    return f"{refusal.reason} {_REMEDY}" if refusal.code in _IN_ITS_FORWARD else refusal.reason


def why_left(work: Work, c: Candidate) -> str | None:
    """Why the activation behind this linear is not part of its call; None where there is none, or
    where it is."""
    if c.fallback is not None:
        return in_words(c.fallback)
    if c.chain is not None or c.activation != "none":
        return None
    site = next((s for s in work.profile.sites if s.fqn == c.fqn), None)
    return site.reason if site is not None and site.code in _BY_ITS_CODE else None


def told(work: Work, outcome: SiteOutcome) -> SiteOutcome:
    """The outcome of a linear, with why its activation was left alone."""
    c = next((c for c in work.every if c.fqn == outcome.fqn), None)
    why = None if c is None or work.unproven is not None else why_left(work, c)
    if why is None or why in outcome.reason:
        return outcome
    reason = outcome.reason.removesuffix(".")
    return replace(outcome, reason=f"{reason}; {TOLD}{why}")


def find(work: Work) -> None:
    """Say it in the findings on linears with activations as well."""
    left = {c.fqn: why for c in work.every if (why := why_left(work, c)) is not None}
    work.profile = replace(
        work.profile,
        findings=tuple(
            replace(
                f,
                message=f"{f.message} optimize_ leaves the activation alone: {left[f.fqn]}",
                details=f.details | {"left_alone": left[f.fqn]},
            )
            if f.code == "linear_activation" and f.fqn in left
            else f
            for f in work.profile.findings
        ),
    )
