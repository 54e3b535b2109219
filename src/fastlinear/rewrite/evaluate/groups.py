"""Layers that could be one as findings: what ``grouped_linear`` saves on a model's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.cost import Cost, floor_us, measure_ceilings
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.timing import interleave
from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.profile.records import IN_PLACE, Finding
from fastlinear.rewrite.evaluate.covered import covered
from fastlinear.rewrite.evaluate.groups_lists import KIND, of_list
from fastlinear.rewrite.evaluate.groups_parallel_mlps import of_parallel_mlps
from fastlinear.rewrite.evaluate.groups_products import WHY, of_product
from fastlinear.rewrite.evaluate.groups_units import Run, Unit, of_row, of_whole
from fastlinear.rewrite.evaluate.groups_watch import watched
from fastlinear.rewrite.evaluate.not_measured import budget_spent, not_measured
from fastlinear.rewrite.evaluate.of_the_step import of_the_step
from fastlinear.rewrite.outcome import SiteOutcome
from fastlinear.rewrite.rules.grouped.lists.fuse import UNEQUAL
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import Standing
from fastlinear.rewrite.work import OFFERED, Work

CODE = "grouped_linear"
_RULES = (NAME, UNEQUAL)
_MOST_S = 0.5  # of measuring one


def find(work: Work) -> None:
    """Add a finding for layers that ``grouped_linear`` computes faster as one, rewritten or not,
    and for those there was no time to measure.

    Nothing is rewritten here. The model may run once more, and is to be preserved by the caller.
    """
    if not work.allows(NAME):
        return
    seen = watched(work)
    units = [of_row(work, row, seen.linears) for row in seen.rows]
    units += [of_whole(work.model, match, calls) for match, calls in seen.wholes]
    units += [of_parallel_mlps(work, one, seen.firsts) for one in work.standing]
    known = [set(row.members) for row in seen.rows]
    known += [set(match.members) for match, _ in seen.wholes]
    units += [of_list(work, o, seen.firsts) for o in work.listed if set(o.linears) not in known]
    units += [of_product(work.model, product) for product in seen.products]
    work.left_alone |= {product.fqn: WHY for product in seen.products}
    wanted = [u for u in units if u is not None and u.dtype in DTYPE_NAMES]
    found = [_untold(one) for one in work.standing if not one.parallel_mlps]
    for i, unit in enumerate(wanted):
        kept = _kept(work, unit)
        if work.budget.left_s == 0 and kept is None:
            found.append(_unmeasured(work, unit))
            continue
        with work.budget:
            share = work.budget.share(4 * (len(wanted) - i), _MOST_S)
            times = _known(kept, unit) or _measured(work, unit, share)
        if times is not None:
            found.append(_finding(work, unit, *times))
    if found:
        others = work.profile.findings
        for f in found:
            if f.details["kind"] in ("towers", KIND) and f.predicted_gain_us:
                others = covered(others, f.details["linears"], f)  # with their activations
        ranked = sorted((*others, *_once(found)), key=lambda f: -f.predicted_gain_us)
        work.profile = replace(work.profile, findings=tuple(ranked))


def _once(found: list[Finding]) -> list[Finding]:
    """Rows among the linears of a larger list claim no gain beside the list's, nor it beside
    theirs where that is larger."""
    for f in [f for f in found if f.details["kind"] == KIND]:
        mine = set(f.details["linears"])
        others = [g for g in found if g is not f and mine & set(g.details.get("linears", ()))]
        if others and sum(g.predicted_gain_us for g in others) > f.predicted_gain_us:
            found = [g for g in found if g is not f]
        else:
            names = [n for g in others for n in g.details["linears"]]
            found = [g if g is f else h for g in found for h in covered((g,), names, f)]
    return found


def _unmeasured(work: Work, unit: Unit) -> Finding:
    words = f"{unit.words} (perhaps better as {unit.advice})"
    details = {"kind": unit.kind, "calls": unit.calls, "linears": list(unit.sites)}
    details["advice"] = unit.advice
    return not_measured(CODE, unit.fqn, unit.title, words, budget_spent(work), details)


def _untold(one: Standing) -> Finding:
    """Sequentials side by side that are no parallel MLPs."""
    words = f"{len(one.names)} Sequentials side by side run one after another"
    first, *_, last = one.names
    title = f"{first!r} to {last!r}"
    return not_measured(CODE, one.fqn, title, words, str(one.made), {"kind": "towers"})


def _kept(work: Work, unit: Unit) -> SiteOutcome | None:
    """The outcome of its first layer, where it is rewritten as one."""
    outcome = work.outcomes.get(unit.sites[0])
    if outcome is None or outcome.rule not in _RULES or outcome.status != "kept":
        return None
    return outcome


def _known(kept: SiteOutcome | None, unit: Unit) -> tuple[float, float] | None:
    """Times of one call of what is rewritten, measured before that was kept."""
    if kept is None or kept.before_us is None or kept.after_us is None:
        return None
    calls = unit.calls / len(unit.sites)
    return kept.before_us / calls, kept.after_us / calls


def _measured(work: Work, unit: Unit, budget_s: float) -> tuple[float, float] | None:
    """Microseconds of one call before and after; None where that is not faster beyond noise."""
    train = work.runner.mode == "train"
    first = _timed(unit.before, unit.leaves_before, train, unit.input_grad)
    second = _timed(unit.after, unit.leaves_after, train, unit.input_grad)
    with torch.set_grad_enabled(train):
        first(), second()
        times = interleave(
            {"before": first, "after": second},
            device=work.runner.device,
            metric="wall",
            rounds=9,
            budget_s=budget_s,
        )
    old, new = times["before"], times["after"]
    return None if new.ci95_us[1] >= old.ci95_us[0] else (old.median_us, new.median_us)


def _finding(work: Work, unit: Unit, before_us: float, after_us: float) -> Finding:
    before_us, after_us, said = of_the_step(work, before_us, after_us, unit.calls)
    passes = (
        3 if work.runner.mode == "train" else 1
    )  # backward: twice the products, the same tensors
    cost = Cost(passes * unit.cost.flops, passes * unit.cost.bytes)
    limits = measure_ceilings(str(work.runner.device), DTYPE_NAMES[unit.dtype])
    compute = cost.flops / limits.flops_per_s >= cost.bytes / limits.bytes_per_s
    return Finding(
        code=CODE,
        fqn=unit.fqn,
        title=unit.title,
        message=(
            f"{unit.words}: {before_us:.1f} us, {after_us:.1f} us as one"
            f"{f' ({said})' if said else ''}. {_remedy(work, unit)}"
        ),
        measured_us=before_us * unit.calls,
        floor_us=floor_us(cost, limits) * unit.calls,
        predicted_gain_us=(before_us - after_us) * unit.calls,
        flops=cost.flops * unit.calls,
        bytes=cost.bytes * unit.calls,
        bound="compute" if compute else "memory",
        details={
            "kind": unit.kind,
            "calls": unit.calls,
            "linears": list(unit.sites),
            "advice": unit.advice if _kept(work, unit) is None else IN_PLACE,
        },
    )


def _remedy(work: Work, unit: Unit) -> str:
    """What to do about it, and why ``optimize_`` has not done it."""
    if _kept(work, unit) is not None:
        return f"{IN_PLACE}."
    outcome = work.outcomes.get(unit.sites[0])
    why = next((work.left_alone[n] for n in unit.sites if n in work.left_alone), None)
    if outcome is not None and outcome.rule in _RULES and outcome.status == "rejected":
        why = outcome.reason.rstrip(".")
    stacks = len(unit.sites) > 1 and unit.kind != KIND
    stacking = ", which has to lay the weights together at each call," * stacks
    left = "" if why is None else f" optimize_{stacking} leaves it alone: {why}."
    left = f" {OFFERED}." if unit.sites[0] in work.offered else left
    return f"Replace by {unit.advice}.{left}"


def _timed(run: Run, leaves: list[Tensor], train: bool, input_grad: bool) -> Callable[[], Any]:
    if not train:
        return run
    if input_grad:
        leaves[0].requires_grad_()
    wanted = [t for t in leaves if t.requires_grad]
    if not wanted:
        return run

    def step() -> None:
        ys = [y for y in run() if y.requires_grad]
        if ys:  # not where x and weights are detached; one of them may be
            torch.autograd.grad(ys, wanted, [torch.ones_like(y) for y in ys], allow_unused=True)

    return step
