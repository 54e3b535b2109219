"""The fusions that rule folders find: those to put in place, and findings from the same times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastlinear.core.cost import measure_ceilings, roofline
from fastlinear.core.timing import Samples
from fastlinear.dispatch.backend import family
from fastlinear.profile.records import IN_PLACE, Finding
from fastlinear.rewrite import registry
from fastlinear.rewrite.evaluate import site
from fastlinear.rewrite.evaluate.covered import covered
from fastlinear.rewrite.evaluate.not_measured import budget_spent, not_measured
from fastlinear.rewrite.evaluate.of_the_step import of_the_step
from fastlinear.rewrite.evaluate.parents import offers
from fastlinear.rewrite.fusion import Fusion, Report
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.session import Session
from fastlinear.rewrite.work import OFFERED, Work

_MOST_S = 0.5  # of timing a fusion for a finding
_ROUNDS = 9


def session_of(work: Work, candidates: Mapping[str, Candidate]) -> Session:
    """What rules see of an optimization."""
    return Session(
        model=work.model,
        train=work.runner.mode == "train",
        candidates=candidates,
        sites={s.fqn: s for s in work.profile.sites},
        offers=partial(offers, work),
        step=work.step,
    )


def to_put_in_place(work: Work, candidates: Mapping[str, Candidate]) -> list[Fusion]:
    """What rules find that may be put in place, each linear in the first fusion that has it."""
    session, taken = session_of(work, candidates), set[str]()
    found = []
    for rule in registry.RULES:
        if not (rule.rewrites and work.allows(rule.family)):
            continue
        for fusion in rule.find(session):
            if taken.isdisjoint(fusion.names):
                taken.update(fusion.names)
                found.append(fusion)
    work.fusions = found
    return found


def find(work: Work) -> None:
    """Add a finding for every fusion that is measured faster, put in place or not.

    What was tried is reported from the times that decided about it. Nothing is rewritten here. The
    model may run once more, and is to be preserved by the caller.
    """
    session = session_of(work, {c.fqn: c for c in work.every})
    found, known = [], work.profile.findings
    for fusion, finding in _findings(work, work.fusions):
        found.append(finding)
        known = covered(known, fusion.names, finding)
    for rule in registry.RULES:
        if not rule.rewrites and work.allows(rule.family):
            found += [finding for _, finding in _findings(work, rule.find(session))]
    ranked = sorted((*known, *found), key=lambda f: -f.predicted_gain_us)
    work.profile = replace(work.profile, findings=tuple(ranked))


def _findings(work: Work, fusions: list[Fusion]) -> Iterator[tuple[Fusion, Finding]]:
    for i, fusion in enumerate(fusions):
        report = fusion.report
        tried = fusion.forward is not None and fusion.key not in work.offered
        if report is None or (tried and fusion.kind not in work.timed):
            continue
        times = _times(work, fusion, len(fusions) - i)
        if times is None:
            yield fusion, _unmeasured(work, fusion, report)
        elif times["after"].ci95_us[1] < times["before"].ci95_us[0]:
            yield fusion, _finding(work, fusion, report, times)


def _times(work: Work, fusion: Fusion, left: int) -> dict[str, Samples] | None:
    """Before and after, each kind of fusion once; None where the budget is spent."""
    if fusion.kind not in work.timed:
        if work.budget.left_s == 0:
            return None
        share = work.budget.share(4 * left, _MOST_S)
        runs: dict[str, site.Run] = {"before": fusion.before, "after": fusion.after}
        with work.budget:
            device = work.runner.device
            times, _ = site.times(fusion, runs, device, share, rounds=_ROUNDS)
        work.timed[fusion.kind] = times
    found: dict[str, Samples] = work.timed[fusion.kind]
    return found


def _unmeasured(work: Work, fusion: Fusion, report: Report) -> Finding:
    more = f"{report.title} ({report.note})" if report.note else report.title
    facts = _facts(work, fusion, report)
    return not_measured(fusion.rule, fusion.fqn, report.title, more, budget_spent(work), facts)


def _finding(work: Work, fusion: Fusion, report: Report, times: dict[str, Samples]) -> Finding:
    calls, problem = fusion.calls.calls, fusion.problems[0]
    before, after = (times[name].median_us for name in ("before", "after"))
    before_us, after_us, said = of_the_step(work, before, after, calls)
    cost = family(problem.family).cost(problem)
    limits = measure_ceilings(str(fusion.calls.kinds[0].x.device), problem.dtype)
    line = roofline(cost, limits, before_us)
    facts = _facts(work, fusion, report)
    more = _remedy(work, fusion, facts) + (f" Times: {said}." if said else "")
    return Finding(
        code=fusion.rule,
        fqn=fusion.fqn,
        title=report.title,
        message=report.message(before_us, after_us) + more,
        measured_us=before_us * calls,
        floor_us=line.floor_us * calls,
        predicted_gain_us=(before_us - after_us) * calls,
        flops=cost.flops * calls,
        bytes=cost.bytes * calls,
        bound=line.bound,
        details={**facts, "problem": problem.to_json()},
    )


def _facts(work: Work, fusion: Fusion, report: Report) -> dict[str, Any]:
    facts = {**report.details, "calls": fusion.calls.calls}
    if fusion.forward is None:
        return {**facts, "advice": report.advice}
    outcome = work.outcomes.get(fusion.key)
    if outcome is not None and (outcome.rule, outcome.status) == (fusion.rule, "kept"):
        return {**facts, "advice": IN_PLACE}
    why = work.left_alone.get(fusion.key) or (outcome and outcome.reason)
    return {**facts, "left_alone": why} if why else facts


def _remedy(work: Work, fusion: Fusion, facts: dict[str, Any]) -> str:
    """What becomes of a fusion that ``optimize_`` may put in place, as a sentence."""
    if fusion.forward is None:
        return ""
    if fusion.key in work.offered:
        return f" {OFFERED}."
    if "left_alone" in facts:
        return f" optimize_ leaves it alone: {facts['left_alone'].rstrip('.')}."
    return f" {IN_PLACE}."
