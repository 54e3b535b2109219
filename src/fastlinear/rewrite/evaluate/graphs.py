"""CUDA graphs: offered where a model, or a part of it, is launch-bound; tried where asked for."""

from __future__ import annotations

from dataclasses import replace

from fastlinear.core.timing import Ratio
from fastlinear.profile.launch_bound import OFFER
from fastlinear.profile.records import Finding
from fastlinear.rewrite.evaluate.python_state import LOOKED_FOR, why_not_replayed
from fastlinear.rewrite.evaluate.regions import choose_regions, note_regions, planned_regions
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.evaluate.try_graph import (
    KeptGraph,
    Outcome,
    pair_of,
    refused_by_recording,
    settle,
    tried,
    untouchable,
    within_memory,
)
from fastlinear.rewrite.finding import in_words
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.verify.finite import NOT_FINITE
from fastlinear.rewrite.work import Work

_OTHER_WORK = 1.3  # of the device's time in the profile: replayed, the model does other work
_NOR_ITS_PARTS = ("needs_cuda", "already_rewritten", NOT_FINITE)


def choose_graph(
    work: Work, kept: list[Candidate], *, planned: tuple[str, ...] | None = None
) -> KeptGraph | None:
    """The model as CUDA graphs, or else its largest launch-bound parts, if that is faster beyond
    noise than the model with the rewrites kept so far.

    The model as a whole is tried with those rewrites inside and, where that does not gain, without
    them. Without ``Config.graphs`` what could be replayed is only offered, in a note.

    Args:
        work: the optimization under way; outcomes, notes and findings are added to it.
        kept: the rewrites of linears kept so far.
        planned: the modules that a plan asks for, ``""`` the model. They need not be found
            launch-bound again, and stay unless they are slower.
    """
    finding = next((f for f in work.profile.findings if f.code == "launch_bound"), None)
    if not work.config.graphs:
        _note(work, finding)
        return None
    if planned is not None and "" not in planned:
        return planned_regions(work, kept, planned)
    found = _whole(work, kept, finding, planned is not None)
    outcome = found.outcome if isinstance(found, KeptGraph) else found
    gain = None if finding is None else finding.predicted_gain_us
    settle(work, "", gain, outcome)
    if planned is not None or outcome.code in _NOR_ITS_PARTS:
        return found if isinstance(found, KeptGraph) else None
    if not isinstance(found, KeptGraph):
        if outcome.code == "waits_for_device" and not work.config.compile:
            work.notes.append(
                "the model waits for a value of the device, so its parts are replayed one by one; "
                "torch.compile may trace past that: try Config(graphs=True, compile=True)"
            )
        return choose_regions(work, kept)
    if found.pair.after.median_us <= _OTHER_WORK * work.profile.device_busy_us:
        return found
    return _or_its_parts(work, found, gain)


def _note(work: Work, finding: Finding | None) -> None:
    """Say what CUDA graphs would save, without recording any."""
    why = untouchable(work, "")
    if why is not None and why.code in _NOR_ITS_PARTS:
        return
    state = why_not_replayed(work.model, lambda: None)
    if finding is None or not _offered(finding) or why is not None or state is not None:
        note_regions(work)
        return
    work.notes.append(
        f"launch-bound: CUDA graphs would save up to {finding.predicted_gain_us:.0f} us a "
        "step; ask for them with Config(graphs=True) or --graphs (they take memory)"
    )


def _offered(finding: Finding | None) -> bool:
    return finding is not None and finding.details.get("offer") == OFFER


def _whole(
    work: Work, kept: list[Candidate], finding: Finding | None, planned: bool
) -> KeptGraph | Outcome:
    """The model as a whole, with the rewrites kept so far inside or without them."""
    base = swaps_of(kept)
    why = _why_not(work, finding, planned) or _writes_state(work)
    why = why or refused_by_recording(work, "", base)
    if why is not None:
        return why
    rival = "with the other rewrites but without graphs" if kept else "as it was"
    found = tried(work, ("",), kept, base, rival, planned)
    if isinstance(found, KeptGraph) or not kept or planned:
        return found
    alone: KeptGraph | Outcome | None = refused_by_recording(work, "", ())
    alone = alone or tried(work, ("",), [], base, rival, planned)
    if not isinstance(alone, KeptGraph):
        return found
    for c in kept:
        text = "slower than the whole model as CUDA graphs without it"
        work.settle(c.fqn, "rejected", "graph_alone", text)
    return alone


def _or_its_parts(work: Work, whole: KeptGraph, gain_us: float | None) -> KeptGraph:
    """The whole as one graph or, where that is faster, its parts.

    Some models do other work while they are recorded: transformers' masks, say, are left out of a
    plain call where they hide nothing, but not of a recorded one, and a slower attention follows.
    """
    parts = choose_regions(work, whole.kept)
    if parts is None:
        return whole
    best, other = SwapSet(parts.swaps), SwapSet(whole.swaps)

    def run() -> Ratio | Outcome:
        with work.budget:
            return pair_of(work, best, other).speedup

    ratio = within_memory(work, "with both recorded, the whole and its parts", [best, other], run)
    if isinstance(ratio, Outcome):
        return whole
    best.release()
    other.release()
    if ratio.low > 1.0:
        text = f"its parts as CUDA graphs are {in_words(ratio)} as fast"
        told = replace(whole.outcome, status="rejected", code="parts_faster", reason=text)
        settle(work, "", gain_us, told)
        return parts
    for name in parts.names:
        text = "slower than the whole model as one CUDA graph"
        known = work.graphs[name]
        work.graphs[name] = replace(known, status="rejected", code="whole_faster", reason=text)
    return whole


def _why_not(work: Work, finding: Finding | None, planned: bool) -> Outcome | None:
    """The reason for not even trying, or None."""
    why = untouchable(work, "")
    if why is not None or planned:
        return why
    if finding is None:
        step, busy = work.profile.step_us, work.profile.device_busy_us
        text = f"Not launch-bound: the device is busy for {busy:.0f} of {step:.0f} us."
        return Outcome("nothing_to_do", "not_launch_bound", text)
    if not _offered(finding):
        return Outcome("refused", "waits_for_device", str(finding.details.get("no_graph")))
    return None


def _writes_state(work: Work) -> Outcome | None:
    reason = why_not_replayed(work.model, lambda: work.step(LOOKED_FOR))
    return None if reason is None else Outcome("refused", "python_state", reason)
