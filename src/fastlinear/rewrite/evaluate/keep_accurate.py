"""Keeping what is accurate: the whole model verified, and the sites that pass together."""

from __future__ import annotations

from typing import Any

from fastlinear.core.compare import Verdict
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.evaluate.out_of_memory import code_of_verdict
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.verify import model as verify
from fastlinear.rewrite.verify.finite import NOT_FINITE, REMEDY, partly_finite
from fastlinear.rewrite.verify.oracle import make_oracle
from fastlinear.rewrite.work import Work


def keep_accurate(
    work: Work, candidates: list[Candidate]
) -> tuple[list[Candidate], tuple[Verdict, ...]]:
    """Verify the whole model; on a failure search for the sites that pass together."""
    if not candidates:
        return [], ()
    work.progress("verify", 0, 1)
    judge_of(work)
    verdicts = _verdicts(work, candidates)
    kept = candidates
    failed = next((v for v in verdicts if not v.passed), None)
    if failed is not None and failed.unproven:
        for c in candidates:
            work.settle(c.fqn, "refused", NOT_FINITE, f"{failed}. {REMEDY}")
        kept, verdicts = [], []
    elif failed is not None:
        kept = _bisect(work, candidates)
        names = {c.fqn for c in kept}
        for c in candidates:
            if c.fqn not in names:
                text = f"less accurate in the whole model: {failed}"
                work.settle(c.fqn, "rejected", code_of_verdict(failed), text)
        verdicts = _verdicts(work, kept) if kept else []
        wavering = next((v for v in verdicts if not v.passed), None)
        if wavering is not None:  # the model's own results differ from run to run
            for c in kept:
                text = f"less accurate in the whole model, though not every time: {wavering}"
                work.settle(c.fqn, "rejected", "less_accurate", text)
            kept, verdicts = [], []
    skipped = dict.fromkeys(judge_of(work).skipped)
    work.notes += [f"verification skipped {text}" for text in skipped]
    if (left := partly_finite(verdicts)) is not None:
        work.notes.append(left)
    work.progress("verify", 1, 1)
    return kept, tuple(verdicts)


def judge_of(work: Work) -> verify.Judge:
    """The judge of this model, made when first asked for; swaps must be off."""
    if work.judge is None:
        oracle, exact = make_oracle(work.model, work.runner, work.call, work.ran)
        work.notes.append(f"accuracy judged against: {oracle.name}")
        work.judge = verify.Judge(
            work.model,
            work.runner,
            work.call,
            draws=work.config.draws,
            oracle=oracle,
            seconds=work.config.time_budget_s,
            ran=work.ran,
            exact=exact,
        )
        del work.ran  # the judge keeps it while it is small
    return work.judge


def _verdicts(work: Work, candidates: list[Candidate]) -> list[Verdict]:
    return verdicts_of(work, SwapSet(swaps_of(candidates)))


def verdicts_of(work: Work, swaps: SwapSet, like: SwapSet | None = None) -> list[Verdict]:
    """Every comparison of the model with these swaps; the rest as in ``Judge.verdicts``."""
    judge = judge_of(work)
    found = judge.verdicts(swaps, like)
    if work.runner.mode == "train" and all(v.passed for v in found):
        found += judge.trajectory(swaps, work.config.optimizer_steps, like)
    return found


def _bisect(work: Work, candidates: list[Candidate]) -> list[Candidate]:
    units: dict[str, list[Candidate]] = {}
    for c in candidates:
        units.setdefault(c.unit, []).append(c)

    def passes(names: Any) -> bool:
        chosen = [c for name in names for c in units[name]]
        return all(v.passed for v in _verdicts(work, chosen))

    with measure.Budget(work.config.time_budget_s) as budget:
        names = verify.keep_passing(list(units), passes, lambda: budget.left_s == 0)
    return [c for u in names for c in units[u]]
