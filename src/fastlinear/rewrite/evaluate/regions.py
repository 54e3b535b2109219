"""The largest launch-bound parts of a model as CUDA graphs, where the model as a whole is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fastlinear.core.precision import float32_precision
from fastlinear.profile import clock
from fastlinear.profile.launch_regions import CODE, launch_regions
from fastlinear.profile.records import Finding
from fastlinear.profile.site_cost import Step
from fastlinear.rewrite.evaluate.not_measured import NO_TIME
from fastlinear.rewrite.evaluate.python_state import (
    LOOKED_FOR,
    Written,
    why_not_replayed_alone,
    written,
)
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.evaluate.try_graph import (
    KeptGraph,
    Outcome,
    refused_by_recording,
    settle,
    tried,
    untouchable,
)
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.swap.graph_forward import with_graph
from fastlinear.rewrite.swap.modules import Swap
from fastlinear.rewrite.work import UNDECIDED, Work

_NAMED = 3  # parts a note calls by name
WhyNot = Callable[[str], Outcome | None]


def choose_regions(work: Work, kept: list[Candidate]) -> KeptGraph | None:
    """The outermost launch-bound parts that can be recorded, as far as they make the step faster.

    Parts alike (of one class, with as many launches) are tried together, those that should save
    the most first, each time against the model with what is kept so far. Where a part cannot be
    recorded, the parts of it are looked at.
    """
    base = swaps_of(kept)
    offers = _offers(work, _recording(work, base), tell=True)
    best: KeptGraph | None = None
    for group in _alike(offers):
        names = [f.fqn for f in group]
        if work.budget.left_s == 0:
            found: KeptGraph | Outcome = Outcome(UNDECIDED, NO_TIME, "Not measured: no time.")
        else:
            before = best.names if best else ()
            against = with_graph(base, work.model, before)
            rival = "without it" if len(group) == 1 else f"without these {len(group)} parts"
            found = tried(work, (*before, *names), kept, against, rival, planned=False)
        outcome = found.outcome if isinstance(found, KeptGraph) else found
        best = found if isinstance(found, KeptGraph) else best
        for f in group:
            settle(work, f.fqn, f.predicted_gain_us, outcome, f.details["calls"])
    return best


def planned_regions(work: Work, kept: list[Candidate], names: Sequence[str]) -> KeptGraph | None:
    """The parts that a plan names, all together; they stay unless they are slower."""
    base = swaps_of(kept)
    why_not = _recording(work, base)
    outcomes = {name: why_not(name) for name in names}
    usable = [name for name, outcome in outcomes.items() if outcome is None]
    found: KeptGraph | Outcome | None = None
    if usable:
        rival = "with the other rewrites but without graphs" if kept else "as it was"
        found = tried(work, usable, kept, base, rival, planned=True)
    for name, outcome in outcomes.items():
        told = outcome or (found.outcome if isinstance(found, KeptGraph) else found)
        assert told is not None
        settle(work, name, None, told)
    return found if isinstance(found, KeptGraph) else None


def note_regions(work: Work) -> None:
    """Say which parts CUDA graphs would make faster, as far as can be told without recording."""
    state = written(work.model, lambda: None)

    def why_not(name: str) -> Outcome | None:
        return untouchable(work, name) or _stateful(work, name, state)

    offers = _offers(work, why_not, tell=False)
    if offers:
        names = ", ".join(f.fqn for f in offers[:_NAMED])
        more = f" and {len(offers) - _NAMED} more" if len(offers) > _NAMED else ""
        gain = min(
            sum(f.predicted_gain_us for f in offers),
            work.profile.step_us - work.profile.device_busy_us,
        )
        work.notes.append(
            f"launch-bound parts: CUDA graphs of {names}{more} would save up to {gain:.0f} us a "
            "step; ask for them with Config(graphs=True) or --graphs (they take memory)"
        )


def _recording(work: Work, base: Sequence[Swap]) -> WhyNot:
    """Why a part cannot be replayed, by running the model and by recording the part."""
    with work.budget:
        state = written(work.model, lambda: work.step(LOOKED_FOR))

    def why_not(name: str) -> Outcome | None:
        why = untouchable(work, name) or _stateful(work, name, state)
        if why is not None:
            return why
        with work.budget:
            return refused_by_recording(work, name, base)

    return why_not


def _stateful(work: Work, name: str, state: Mapping[nn.Module, Written]) -> Outcome | None:
    reason = why_not_replayed_alone(work.model.get_submodule(name), state)
    return None if reason is None else Outcome("refused", "python_state", reason)


def _offers(work: Work, why_not: WhyNot, *, tell: bool) -> list[Finding]:
    """The outermost launch-bound parts that nothing speaks against. They become findings of the
    profile; ``tell``: the others become outcomes."""
    apart, looked_at = {""}, set()
    offers: list[Finding] = []
    while work.budget.left_s > 0:
        found = [f for f in _regions(work, apart) if f.fqn not in looked_at]
        if not found:
            break
        for f in found:
            looked_at.add(f.fqn)
            outcome = why_not(f.fqn)
            if outcome is None:
                offers.append(f)
                continue
            if outcome.status != "nothing_to_do":
                apart.add(f.fqn)
            if tell:
                settle(work, f.fqn, f.predicted_gain_us, outcome, f.details["calls"])
    known = {f.fqn for f in work.profile.findings if f.code == CODE}
    findings = (*work.profile.findings, *(f for f in offers if f.fqn not in known))
    ranked = sorted(findings, key=lambda f: -f.predicted_gain_us)
    work.profile = replace(work.profile, findings=tuple(ranked))
    return offers


def _regions(work: Work, apart: set[str]) -> tuple[Finding, ...]:
    seen = work.profile
    device = torch.device(seen.device)
    step = Step(
        mode=seen.mode,
        device=device.type,
        step_us=seen.step_us,
        busy_us=seen.device_busy_us,
        precision=float32_precision(),
        op_us=0.0,
    )
    ceilings = partial(clock.ceilings, device)
    return launch_regions(step, seen.records, seen.sites, ceilings, apart)


def _alike(offers: list[Finding]) -> list[list[Finding]]:
    """Parts of one class with as many launches and calls together, largest gain first."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for f in offers:
        key = tuple(f.details[name] for name in ("class", "launches", "calls"))
        groups.setdefault(key, []).append(f)
    return sorted(groups.values(), key=lambda g: -sum(f.predicted_gain_us for f in g))
