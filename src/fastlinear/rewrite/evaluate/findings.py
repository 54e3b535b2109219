"""What rules find: fusions to try, and findings from the times that decided about them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastlinear.core.cost import measure_ceilings, roofline
from fastlinear.core.progress import Progress, silent
from fastlinear.core.timing import Ratio, Samples, paired_ratio
from fastlinear.dispatch.backend import family
from fastlinear.fastpath import lookup
from fastlinear.profile.records import IN_PLACE, Finding
from fastlinear.rewrite import registry
from fastlinear.rewrite.evaluate import activations_left, site
from fastlinear.rewrite.evaluate.not_measured import budget_spent
from fastlinear.rewrite.evaluate.of_the_step import of_the_step
from fastlinear.rewrite.evaluate.out_of_memory import contained
from fastlinear.rewrite.evaluate.parents import offers
from fastlinear.rewrite.finding import OFFERED, Told, covered, not_measured
from fastlinear.rewrite.fusion import Fusion, Report
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.session import Session, Times
from fastlinear.rewrite.site_outcome import SiteOutcome
from fastlinear.rewrite.work import Work

_MOST_S = 0.5  # of timing a fusion for a finding
_ROUNDS = 9


def session_of(work: Work) -> Session:
    """What rules see of an optimization: the same object for all of it."""
    if work.session is None:
        work.session = Session(
            model=work.model,
            train=work.runner.mode == "train",
            device=work.runner.device,
            sites={s.fqn: s for s in work.profile.sites},
            records=work.profile.records,
            arguments=work.arguments,
            backends=work.config.backends,
            filter_fn=work.filter_fn,
            offers=partial(offers, work),
            step=work.step,
            forward=work.forward,
            times=partial(times, work),
            finding=partial(finding, work),
            candidates={c.fqn: c for c in work.every},
            left_alone=work.left_alone,
            outcomes=work.outcomes,
        )
    return work.session


def match(
    work: Work, candidates: Iterable[Candidate], names: Container[str] | None = None
) -> list[Fusion]:
    """What rules find that may be put in place; ``names`` are the rules that may take part."""
    session = session_of(work)
    session.candidates, session.found = {c.fqn: c for c in candidates}, []
    for rule in registry.RULES:
        wanted = names is None or any(name in names for name in rule.names)
        if wanted and rule.rewrites and work.allows(rule.family):
            session.found += rule.find(session)
    if names is not None:
        session.found = [f for f in session.found if f.rule in names]
    return sorted(session.found, key=lambda f: not f.competes)


def find(work: Work, progress: Progress = silent) -> None:
    """Add the findings of all rules, put in place or not.

    Nothing is rewritten here. The model may run once more, and is to be preserved by the caller.
    """
    rules = [rule for rule in registry.RULES if work.allows(rule.family)]
    told: list[Told] = []
    for i, rule in enumerate(rules):
        progress("findings", i, len(rules))
        look = partial(rule.findings, session_of(work))
        told += contained(work, "looking for more", look, [])
    found = covered((*work.profile.findings, *(one.finding for one in told)), told)
    ranked = sorted(found, key=lambda f: -f.predicted_gain_us)
    work.profile = replace(work.profile, findings=tuple(ranked))
    activations_left.find(work)
    progress("findings", len(rules), len(rules))


def times(work: Work, fusion: Fusion, left: int = 0) -> Times | str:
    """What a fusion takes by the times that decided about it; where there are none, measured, each
    kind of fusion once. Why not, where the time budget is spent. ``left``: how many may follow."""
    calls, kept = fusion.calls.calls, _kept(work, fusion)
    tried = work.tried.get(fusion.tried) or work.timed.get(fusion.kind)
    if kept is not None and kept.before_us is not None and kept.after_us is not None:
        share = len(fusion.names) / calls
        low, high = kept.ci95 or (kept.before_us / kept.after_us,) * 2
        ratio = Ratio(kept.speedup or low, low, high)
        tried = Times(kept.before_us * share, kept.after_us * share, ratio)
    if tried is None:
        if work.budget.left_s == 0:
            return budget_spent(work)
        tried = work.timed[fusion.kind] = measured(work, fusion, left)
    before_us, after_us, said = of_the_step(work, tried.before_us, tried.after_us, calls)
    return replace(tried, before_us=before_us, after_us=after_us, said=said)


def measured(work: Work, fusion: Fusion, left: int) -> Times:
    """What a fusion takes that nothing has decided about; arguments as of ``times``."""
    share = work.budget.share(4 * (1 + left), _MOST_S)
    runs: dict[str, site.Run] = {"before": fusion.before, "after": fusion.after}
    patience_s = work.budget.share(4, lookup.PATIENCE_S)
    with work.budget:
        given = fusion, runs, work.runner.device, share
        found = site.times(*given, rounds=_ROUNDS, patience_s=patience_s)
    return a_call(fusion, *found)


def a_call(fusion: Fusion, found: Mapping[str, Samples], passes: int) -> Times:
    """Times of passes as those of one call."""
    share = passes / fusion.calls.calls
    before, after = found["before"], found["after"]
    ratio = paired_ratio(before, after)
    return Times(before.median_us * share, after.median_us * share, ratio)


def finding(work: Work, fusion: Fusion, left: int = 0) -> Told | None:
    """What is said of a fusion: where it is rewritten, faster, or there was no time to measure it.

    One that the reader cannot put in place is told from the times that decided about it alone.
    Arguments as of ``times``.
    """
    report = fusion.report
    if report is None:
        return None
    tried = fusion.tried in work.tried or fusion.forward is None
    if report.advice is None and not (tried or _offered(work, fusion)):
        return None
    known = times(work, fusion, left)
    if isinstance(known, str):
        return Told(_unmeasured(work, fusion, report, known))
    if not (known.faster or _kept(work, fusion)):
        return None
    found = _finding(work, fusion, report, known)
    return Told(found, fusion.names if report.covers and found.predicted_gain_us > 0 else ())


def _unmeasured(work: Work, fusion: Fusion, report: Report, why: str) -> Finding:
    more = report.words or report.title
    more += f" (perhaps better as {report.advice})" if report.advice else ""
    code, facts = registry.rule_of(fusion.rule).names[0], _facts(work, fusion, report)
    return not_measured(code, fusion.fqn, report.title, more, why, facts)


def _finding(work: Work, fusion: Fusion, report: Report, times: Times) -> Finding:
    calls, problem = fusion.calls.calls, fusion.problems[0]
    cost = report.cost or family(problem.family).cost(problem)
    limits = measure_ceilings(str(work.runner.device), problem.dtype)
    line = roofline(cost, limits, times.before_us)
    facts = _facts(work, fusion, report)
    if report.cost is None:
        facts["problem"] = problem.to_json()
    more = _remedy(work, fusion, report) + (f" Times: {times.said}." if times.said else "")
    return Finding(
        code=registry.rule_of(fusion.rule).names[0],
        fqn=fusion.fqn,
        title=report.title,
        message=report.message(times.before_us, times.after_us) + more,
        measured_us=times.before_us * calls,
        floor_us=line.floor_us * calls,
        predicted_gain_us=(times.before_us - times.after_us) * calls,
        flops=cost.flops * calls,
        bytes=cost.bytes * calls,
        bound=line.bound,
        details=facts,
    )


def _kept(work: Work, fusion: Fusion) -> SiteOutcome | None:
    """The outcome of its first linear, where it is rewritten by a rule of the same family."""
    outcome = _outcome(work, fusion)
    return outcome if outcome is not None and outcome.status == "kept" else None


def _outcome(work: Work, fusion: Fusion) -> SiteOutcome | None:
    """The outcome of its first linear, where the same rule looked at that."""
    outcome = work.outcomes.get(fusion.key)
    known = outcome is not None and outcome.rule in registry.rule_of(fusion.rule).names
    return outcome if known else None


def _facts(work: Work, fusion: Fusion, report: Report) -> dict[str, Any]:
    facts = {**report.details, "calls": fusion.calls.calls}
    if _kept(work, fusion) is not None:
        return {**facts, "advice": IN_PLACE}
    if report.advice is not None:
        return {**facts, "advice": report.advice}
    why = _why_left(work, fusion)
    return {**facts, "left_alone": why} if why else facts


def _why_left(work: Work, fusion: Fusion) -> str | None:
    """Why ``optimize_`` has not put it in place."""
    outcome = _outcome(work, fusion)
    if outcome is not None and outcome.status == "rejected":
        return outcome.reason.rstrip(".")
    if not registry.rule_of(fusion.rule).rewrites:
        return None
    return next((work.left_alone[n] for n in fusion.names if n in work.left_alone), None)


def _remedy(work: Work, fusion: Fusion, report: Report) -> str:
    """What to do about it, and what ``optimize_`` does, as sentences."""
    if _kept(work, fusion) is not None:
        return f" {IN_PLACE}."
    advice, why = f" {report.replace}" if report.replace else "", _why_left(work, fusion)
    if _offered(work, fusion):
        return f"{advice} {OFFERED}."
    if why:
        advice += f" optimize_{report.aside} leaves it alone: {why.rstrip('.')}."
    return advice


def _offered(work: Work, fusion: Fusion) -> bool:
    """Whether ``optimize_`` would try it, where it only advises."""
    tries = registry.rule_of(fusion.rule).rewrites
    return tries and fusion.key in session_of(work).offered
