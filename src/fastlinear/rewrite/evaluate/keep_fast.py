"""Keeping what is fast: the whole model before and after, with fewer rewrites until it gains."""

from __future__ import annotations

from fastlinear.core.timing import Ratio
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.finding import in_words
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.rules.linear_act import find as rule
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.work import GROUP_DROPPED, UNDECIDED, Work


def keep_fast(
    work: Work, candidates: list[Candidate]
) -> tuple[list[Candidate], measure.Pair | None]:
    """Measure the whole model; while it does not gain, drop the group with the least gain.

    Sites whose own A/B leaves them open stay only if the whole step with them is faster,
    beyond noise, than the step with the other rewrites alone.
    """
    kept, pair, proven = candidates, None, Ratio(0.0, 0.0, 0.0)
    while kept:
        work.progress("measure", 0, 1)
        pair = _measure(work, kept)
        if not pair.speedup.low > work.config.min_speedup:
            kept = _without_least(work, kept, pair)
            continue
        sure = [c for c in kept if not _open(work, c)]
        if not sure or len(sure) == len(kept) or proven.low > 1.0:
            break
        added = _measure(work, kept, against=rule.complete(sure, work.every))
        proven = added.speedup
        if proven.low > 1.0:
            break
        text = f"no gain beyond noise: adds {in_words(proven)} to the whole step"
        kept = _drop(work, kept, [c for c in kept if _open(work, c)], text, added)
    work.progress("measure", 1, 1)
    if pair is None or not kept:
        return [], None
    for c in kept:
        work.settle(c.fqn, "kept", "faster", _kept_reason(work, c, pair.speedup, proven))
    return kept, pair


def _measure(
    work: Work, candidates: list[Candidate], against: list[Candidate] | None = None
) -> measure.Pair:
    with work.budget:
        return measure.model_pair(
            work.model,
            SwapSet(swaps_of(candidates)),
            work.runner,
            work.own_call(),
            budget_s=max(1.0, work.budget.left_s / 2),
            min_speedup=work.config.min_speedup if against is None else 1.0,
            against=SwapSet(swaps_of(against or [])),
            patience_s=work.budget.left_s,
        )


def _without_least(work: Work, kept: list[Candidate], pair: measure.Pair) -> list[Candidate]:
    ratio = pair.speedup
    least = min(kept, key=lambda c: _gain(work, c))
    dropped = [c for c in kept if c.group == least.group]
    if work.budget.left_s == 0:
        dropped = kept
    word = "slower" if ratio.high < 1.0 else "no gain beyond noise"
    return _drop(work, kept, dropped, f"{word} end to end: {in_words(ratio)}", pair)


def _drop(
    work: Work, kept: list[Candidate], dropped: list[Candidate], why: str, pair: measure.Pair
) -> list[Candidate]:
    how = "rejected", "slower_model"
    if doubt := work.doubt_of_pair(pair.before, pair.after):
        how, why = (UNDECIDED, UNDECIDED), f"{why}; the measurement is in doubt: {doubt}"
    for c in dropped:
        work.settle(c.fqn, *how, why)
    names = {c.fqn for c in kept} - {c.fqn for c in dropped}
    left = rule.complete([c for c in kept if c.fqn in names], work.every)
    for c in kept:
        if c.fqn in names - {other.fqn for other in left}:
            work.settle(c.fqn, "rejected", "group_dropped", GROUP_DROPPED)
    return left


def _open(work: Work, c: Candidate) -> bool:
    """Whether the site's own A/B is not decided beyond noise."""
    interval = work.outcomes[c.fqn].ci95
    return interval is None or interval[0] <= 1.0


def _gain(work: Work, c: Candidate) -> float:
    known = work.outcomes[c.fqn]
    members = sum(1 for other in work.every if other.group == c.group)
    return ((known.before_us or 0.0) - (known.after_us or 0.0)) * members


def _kept_reason(work: Work, c: Candidate, step: Ratio, proven: Ratio) -> str:
    known = work.outcomes[c.fqn]
    name = known.backend or ""
    what = f"with {c.activation} in one call" if c.activation != "none" else "alone"
    if c.chain is not None:
        what = f"{c.chain.what} in one call"
    assert known.speedup is not None
    assert known.ci95 is not None
    text = f"{name}, {what}, {in_words(Ratio(known.speedup, *known.ci95))}"
    if _open(work, c):
        evidence = f"with it and the other open sites {in_words(proven)} of the step without"
        if not proven.low > 1.0:
            evidence = f"all kept rewrites together {in_words(step)}"
        text += f"; open by itself, decided on the whole step: {evidence}"
    if len(c.problems) > 1:
        text += f"; all {len(c.problems)} kinds of input seen are verified and measured"
    return text
