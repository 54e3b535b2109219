"""The whole model as CUDA graphs: offered where it is launch-bound, tried where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fastlinear.core.compare import Verdict
from fastlinear.core.errors import UnsupportedError
from fastlinear.profile.records import Finding
from fastlinear.profile.step import private_copy
from fastlinear.rewrite import measure
from fastlinear.rewrite.candidate import Candidate
from fastlinear.rewrite.eligible import refuse_module
from fastlinear.rewrite.exchange import swaps_of
from fastlinear.rewrite.graph_forward import GraphForward, with_graph
from fastlinear.rewrite.inputs import Call
from fastlinear.rewrite.keep_accurate import verdicts_of
from fastlinear.rewrite.python_state import why_not_replayed
from fastlinear.rewrite.result import SiteOutcome
from fastlinear.rewrite.swap import Swap, SwapSet
from fastlinear.rewrite.work import Work, in_words

RULE = "graphed"
ROUTE = "graph"


@dataclass(frozen=True)
class _Outcome:
    """What becomes of the attempt, as in ``SiteOutcome``."""

    status: str
    code: str
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptGraph:
    """The model as CUDA graphs, verified and measured.

    Attributes:
        kept: the rewrites of its linears that it records.
        swaps: every forward to exchange, theirs included.
        verdicts: how it compares with the oracle.
        pair: the model as it was against this.
        outcome: what to say of it.
    """

    kept: list[Candidate]
    swaps: tuple[Swap, ...]
    verdicts: tuple[Verdict, ...]
    pair: measure.Pair
    outcome: _Outcome


def choose_graph(work: Work, kept: list[Candidate], *, planned: bool = False) -> KeptGraph | None:
    """The model as CUDA graphs, if that is faster beyond noise than the model with the rewrites
    kept so far: with them inside, else, where that does not gain, without them.

    Without ``Config.graphs`` it is only offered in a note. ``planned``: a plan asks for it, so it
    need not be found launch-bound again, and stays unless it is slower.
    """
    finding = next((f for f in work.profile.findings if f.code == "launch_bound"), None)
    if not work.config.graphs:
        if finding is not None and finding.details.get("offer") == RULE:
            work.notes.append(
                f"launch-bound: CUDA graphs would save up to {finding.predicted_gain_us:.0f} us a "
                "step; ask for them with Config(graphs=True) or --graphs (they take memory)"
            )
        return None
    why = _why_not(work, finding, planned) or _writes_state(work)
    if why is not None:
        return _settled(work, finding, why)
    found = _tried(work, kept, kept, finding, planned)
    if isinstance(found, KeptGraph) or not kept or planned:
        return _settled(work, finding, found)
    alone = _tried(work, [], kept, finding, planned)
    if not isinstance(alone, KeptGraph):
        return _settled(work, finding, found)
    for c in kept:
        text = "slower than the whole model as CUDA graphs without it"
        work.settle(c.fqn, "rejected", "graph_alone", text)
    return _settled(work, finding, alone)


def _why_not(work: Work, finding: Finding | None, planned: bool) -> _Outcome | None:
    """The reason for not even trying, or None."""
    if work.runner.device.type != "cuda":
        return _Outcome(
            "refused", "needs_cuda", f"CUDA graphs do not exist on {work.runner.device}."
        )
    refusal = refuse_module(work.model)
    if refusal is not None:
        return _Outcome("refused", refusal.code, refusal.reason)
    if isinstance(work.model.__dict__.get("forward"), GraphForward):
        text = "It is replayed as CUDA graphs already."
        return _Outcome("nothing_to_do", "already_rewritten", text)
    if planned:
        return None
    if finding is None:
        step, busy = work.profile.step_us, work.profile.device_busy_us
        text = f"Not launch-bound: the device is busy for {busy:.0f} of {step:.0f} us."
        return _Outcome("nothing_to_do", "not_launch_bound", text)
    if finding.details.get("offer") != RULE:
        return _Outcome("refused", "waits_for_device", str(finding.details.get("no_graph")))
    return None


def _writes_state(work: Work) -> _Outcome | None:
    reason = why_not_replayed(work.model, lambda: work.runner.step(work.model, _copy(work)))
    return None if reason is None else _Outcome("refused", "python_state", reason)


def _tried(
    work: Work, inside: list[Candidate], kept: list[Candidate], finding: Any, planned: bool
) -> KeptGraph | _Outcome:
    """The model with the rewrites ``inside`` as CUDA graphs, against the model with those kept."""
    base = swaps_of(inside)
    refused = _refused_by_recording(work, base)
    if refused is not None:
        return refused
    plain, swaps = SwapSet(base), SwapSet(with_graph(base, work.model))
    held = _allocated(work)
    verdicts = verdicts_of(work, swaps, like=plain)
    held = _allocated(work) - held
    failed = next((v for v in verdicts if not v.passed), None)
    if failed is not None:
        swaps.release()
        return _Outcome("rejected", "less_accurate", f"less accurate as CUDA graphs: {failed}")
    with work.budget:
        rival = _pair(work, swaps, SwapSet(swaps_of(kept)))
        pair = _pair(work, swaps, None) if kept else rival
    swaps.release()  # what is kept records its own at the first call, in the caller's mode
    ratio = rival.speedup
    facts = {
        "before_us": rival.before.median_us,
        "after_us": rival.after.median_us,
        "speedup": ratio.median,
        "ci95": (ratio.low, ratio.high),
    }
    against = "with the other rewrites but without graphs" if kept else "as it was"
    text = f"{in_words(ratio)} end to end of the model {against}"
    enough = not ratio.high < 1.0 if planned else min(ratio.low, pair.speedup.low) > _least(work)
    if not enough:
        word = "slower" if ratio.high < 1.0 else "no gain beyond noise"
        return _Outcome("rejected", "slower_model", f"{word}: {text}", facts)
    if held > 0:
        text += f"; its recordings hold about {held / (1 << 20):.1f} MiB"
    text = f"replayed as CUDA graphs, {text}"
    outcome = _Outcome("kept", "in_plan" if planned else "faster", text, facts)
    return KeptGraph(inside, with_graph(base, work.model), tuple(verdicts), pair, outcome)


def _refused_by_recording(work: Work, base: list[Swap]) -> _Outcome | None:
    """Run one step with graphs that refuse rather than run plainly."""
    trial = SwapSet(with_graph(base, work.model, on_unsupported="error"))
    trial.on()
    try:
        work.runner.step(work.model, _copy(work))
    except UnsupportedError as error:
        return _Outcome("refused", "no_graph", str(error))
    except Exception as error:  # noqa: BLE001  out of memory, say: an outcome too
        text = f"recording raises {type(error).__name__}: {error}"
        return _Outcome("rejected", "raises", text)
    finally:
        trial.off()
        trial.release()
    return None


def _pair(work: Work, swaps: SwapSet, against: SwapSet | None) -> measure.Pair:
    return measure.model_pair(
        work.model,
        swaps,
        work.runner,
        _copy(work),
        budget_s=max(1.0, work.budget.left_s / 3),
        min_speedup=_least(work),
        against=against,
    )


def _least(work: Work) -> float:
    return max(1.0, work.config.min_speedup)


def _copy(work: Work) -> Call:
    return Call(*private_copy((work.call.args, work.call.kwargs)))  # some models write to them


def _allocated(work: Work) -> int:
    device = work.runner.device
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _settled(work: Work, finding: Finding | None, found: KeptGraph | _Outcome) -> KeptGraph | None:
    """Write down what becomes of the model as a whole."""
    outcome = found.outcome if isinstance(found, KeptGraph) else found
    work.region = SiteOutcome(
        fqn="",
        rule=RULE,
        activation=None,
        problem=None,
        status=outcome.status,
        code=outcome.code,
        reason=outcome.reason,
        predicted_gain_us=None if finding is None else finding.predicted_gain_us,
        route=ROUTE,
        calls=1,
        **outcome.facts,
    )
    return found if isinstance(found, KeptGraph) else None
