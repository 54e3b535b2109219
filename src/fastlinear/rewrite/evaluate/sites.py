"""Choosing: tune the Problems, then verify and time every site alone."""

from __future__ import annotations

from typing import Any

from fastlinear.core.errors import NotYetError, UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import families
from fastlinear.dispatch.tune import BASELINE
from fastlinear.fastpath import lookup
from fastlinear.rewrite.evaluate import activations_left, measure, site
from fastlinear.rewrite.evaluate.chains import choose_chains, fail_forced
from fastlinear.rewrite.evaluate.not_measured import NO_TIME, NOT_COMPILED, budget_spent
from fastlinear.rewrite.evaluate.out_of_memory import code_of
from fastlinear.rewrite.finding import in_words
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.rules.linear_act import find as rule
from fastlinear.rewrite.verify.finite import NOT_FINITE
from fastlinear.rewrite.work import GROUP_DROPPED, UNDECIDED, Work

_CANNOT_SERVE = "backend_cannot_serve"


def choose(work: Work, candidates: list[Candidate]) -> list[Candidate]:
    """Tune the distinct Problems and drop the sites that have nothing to gain.

    Raises UnsupportedError when a forced backend can serve none of them.
    """
    if not work.allows(rule.RULE):
        for c in candidates:
            work.settle(c.fqn, "refused", "family_off", "Config.families leaves it out.")
        return choose_chains(work, candidates, [])
    problems = heaviest_first(candidates)
    if work.config.tune:
        with work.budget:
            work.tuned = measure.tune_all(
                problems,
                work.runner.device,
                budget=work.budget,
                seed=work.config.seed,
                progress=work.progress,
            )
    kept = [c for c in candidates if _worth_measuring(work, c)]
    unable = [o for c in candidates if (o := work.outcomes[c.fqn]).code == _CANNOT_SERVE]
    if candidates and len(unable) == len(candidates):
        fail_forced(rule.RULE, work.config.backends[rule.RULE], unable[0].reason)
    chosen = _measure_sites(work, rule.complete(kept, work.every))
    return choose_chains(work, candidates, chosen)


def _worth_measuring(work: Work, c: Candidate) -> bool:
    facts: dict[str, Any] = {
        "activation": c.activation,
        "problem": c.problem.to_json(),
        "route": c.route,
        "calls": c.calls.calls,
    }
    try:
        chosen = [measure.backends_of(p, c.backend) for p in c.problems]
    except UnsupportedError as error:
        work.settle(c.fqn, "refused", _CANNOT_SERVE, error.received, **facts)
        return False
    facts["backends"] = chosen[0]
    gain = work.tuned_gain(c, chosen)
    facts["predicted_gain_us"] = work.found_gain(c.fqn) if gain is None else gain
    # An activation module written in Python may gain even where eager is best.
    composed = c.activation_module is not None and not type(
        c.activation_module
    ).__module__.startswith("torch.nn")
    if all(set(b.values()) == {BASELINE} for b in chosen) and not composed:
        asked = [q for p in c.problems for q in measure.deciding(p)]
        if c.fallback is not None:
            why = activations_left.in_words(c.fallback)
            work.settle(c.fqn, "refused", c.fallback.code, why, **facts)
        elif all(p in work.tuned for p in asked):
            if doubt := work.doubt(asked):
                text = f"Dispatch takes PyTorch's own path; the measurement is in doubt: {doubt}."
                work.settle(c.fqn, UNDECIDED, UNDECIDED, text, **facts)
            else:
                text = "PyTorch's own path is the fastest backend for it."
                work.settle(c.fqn, "nothing_to_do", "eager_is_best", text, **facts)
        else:
            status, why = UNDECIDED, "the time budget ran out"
            if not work.config.tune:
                status, why = "nothing_to_do", "tuning is off"
            text = f"Dispatch takes PyTorch's own path; not measured here ({why})."
            work.settle(c.fqn, status, "eager_by_default", text, **facts)
        return False
    reason = "Not measured: the rewrite of its group was given up."
    work.settle(c.fqn, "rejected", "group_dropped", reason, **facts)
    return True


def _measure_sites(work: Work, candidates: list[Candidate]) -> list[Candidate]:
    """Verify every site, then A/B one site of each group; drop what fails or does not gain."""
    accurate = []
    for c in candidates:
        try:
            with work.budget:
                failed = site.failure(c)
        except Exception as error:  # noqa: BLE001  a backend's own error is an outcome too
            text = f"the rewrite raises {type(error).__name__}: {error}"
            work.settle(c.fqn, "rejected", code_of(error), text)
            continue
        if failed is None:
            accurate.append(c)
        elif failed.unproven:
            work.settle(c.fqn, "refused", NOT_FINITE, str(failed))
        else:
            work.settle(c.fqn, "rejected", "less_accurate", f"less accurate: {failed}")
    accurate = rule.complete(accurate, work.every)
    groups: dict[tuple[Any, ...], list[Candidate]] = {}
    for c in accurate:
        groups.setdefault(c.group, []).append(c)
    faster: list[Candidate] = []
    for i, members in enumerate(groups.values()):
        work.progress("sites", i, len(groups))
        if i > 0 and work.budget.left_s == 0:
            for c in members:
                work.settle(c.fqn, UNDECIDED, NO_TIME, f"Not measured: {budget_spent(work)}.")
            continue
        share = work.budget.share(2 * (len(groups) - i), 2.0)
        try:
            with work.budget, lookup.patience(work.budget.left_s):
                pair, passes = site.pair(members[0], work.runner.device, share)
        except NotYetError:
            for c in members:
                text = f"Not measured: {NOT_COMPILED}, and {budget_spent(work)}."
                work.settle(c.fqn, UNDECIDED, NO_TIME, text)
            continue
        except Exception as error:  # noqa: BLE001  as above: out of memory, say
            for c in members:
                text = f"the rewrite raises {type(error).__name__}: {error}"
                work.settle(c.fqn, "rejected", code_of(error), text)
            continue
        if _gains(work, members, pair, passes):
            faster.extend(members)
    work.progress("sites", len(groups), len(groups))
    names = {c.fqn for c in faster}
    return rule.complete([c for c in accurate if c.fqn in names], work.every)


def _gains(work: Work, members: list[Candidate], pair: measure.Pair, passes: int) -> bool:
    ratio = pair.speedup
    better = ratio.median > 1.0  # whether it is beyond noise is decided on the whole model
    doubt = "" if better else work.doubt_of_pair(pair.before, pair.after)
    for c in members:
        facts = {
            "before_us": pair.before.median_us * passes,
            "after_us": pair.after.median_us * passes,
            "speedup": ratio.median,
            "ci95": (ratio.low, ratio.high),
        }
        code = "slower" if ratio.high < 1.0 else "not_faster"
        word = "slower" if ratio.high < 1.0 else "not faster"
        text = f"{word}: {in_words(ratio)}"
        if better:
            work.settle(c.fqn, "rejected", "group_dropped", GROUP_DROPPED, **facts)
        elif doubt:
            text = f"{text}; the measurement is in doubt: {doubt}"
            work.settle(c.fqn, UNDECIDED, UNDECIDED, text, **facts)
        else:
            work.settle(c.fqn, "rejected", code, text, **facts)
    return better


def heaviest_first(candidates: list[Candidate]) -> list[Problem]:
    """Distinct Problems of every kind of call, those with the most arithmetic in a step first."""
    work: dict[Problem, float] = {}
    for c in candidates:
        for problem, kind in zip(c.problems, c.calls.kinds, strict=True):
            flops = families()[rule.RULE].cost(problem).flops * kind.count
            work[problem] = work.get(problem, 0.0) + flops
    return sorted(work, key=lambda p: -work[p])
