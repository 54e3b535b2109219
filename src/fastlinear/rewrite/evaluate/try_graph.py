"""Modules swapped as a whole, on trial: recorded or compiled, verified, measured end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from fastlinear.core.compare import Verdict
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.memory import limited, ran_out
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.evaluate.keep_accurate import verdicts_of
from fastlinear.rewrite.evaluate.out_of_memory import CODE as OUT_OF_MEMORY
from fastlinear.rewrite.evaluate.out_of_memory import code_of, code_of_verdict
from fastlinear.rewrite.evaluate.out_of_memory import in_words as in_line
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.finding import in_words
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.site_outcome import SiteOutcome
from fastlinear.rewrite.swap.graph_forward import GraphForward, with_graph
from fastlinear.rewrite.swap.modules import Swap, SwapSet
from fastlinear.rewrite.verify.finite import NOT_FINITE, REMEDY
from fastlinear.rewrite.work import Work

T = TypeVar("T")
RULE = "graphed"
ROUTE = "graph"


@dataclass(frozen=True)
class Outcome:
    """What becomes of the attempt, as in ``SiteOutcome``."""

    status: str
    code: str
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptGraph:
    """Modules as CUDA graphs, or the model compiled, verified and measured.

    Attributes:
        names: the modules replayed or compiled; ``""`` is the model.
        kept: the rewrites of linears inside.
        swaps: every forward to swap, theirs included.
        verdicts: how the model compares with the oracle.
        pair: the model as it was against this.
        outcome: what to say of it.
    """

    names: tuple[str, ...]
    kept: list[Candidate]
    swaps: tuple[Swap, ...]
    verdicts: tuple[Verdict, ...]
    pair: measure.Pair
    outcome: Outcome
    rule: str = RULE
    route: str = ROUTE
    backend: str | None = None


@dataclass(frozen=True)
class Way:
    """How modules are swapped as a whole.

    Attributes:
        swap: rewrites' swaps → theirs with the whole swapped as well.
        as_what: "as CUDA graphs", or how else, in words.
        done: "replayed as CUDA graphs", or what else is done, in words.
        rule, route, backend: as in ``plan.Rewrite``.
    """

    swap: Callable[[Sequence[Swap]], tuple[Swap, ...]]
    as_what: str
    done: str
    rule: str
    route: str
    backend: str | None = None


def untouchable(work: Work, name: str) -> Outcome | None:
    """Why this module must not be swapped, as far as can be told without running it."""
    if work.runner.device.type != "cuda":
        text = f"CUDA graphs do not exist on {work.runner.device}."
        return Outcome("refused", "needs_cuda", text)
    if work.unproven is not None:
        return Outcome("refused", NOT_FINITE, work.unproven)
    module = work.model.get_submodule(name)
    refusal = refuse_module(module)
    if refusal is not None:
        return Outcome("refused", refusal.code, refusal.reason)
    if isinstance(module.__dict__.get("forward"), GraphForward):
        text = "It is replayed as CUDA graphs already."
        return Outcome("nothing_to_do", "already_rewritten", text)
    return None


def refused_by_recording(work: Work, name: str, base: Sequence[Swap]) -> Outcome | None:
    """Run one step with graphs that refuse rather than run plainly."""
    trial = SwapSet(with_graph(base, work.model, (name,), on_unsupported="error"))
    trial.on()
    with limited(work.runner.device, work.config.trial_memory):
        try:
            work.runner.step(work.model, work.own_call())
        except UnsupportedError as error:
            return Outcome("refused", "no_graph", str(error))
        except Exception as error:  # noqa: BLE001  out of memory, say: an outcome too
            text = f"recording raises {type(error).__name__}: {in_line(error)}"
            return Outcome("rejected", code_of(error), text)
        finally:
            trial.off()
            trial.release()
    return None


def tried(
    work: Work,
    names: Sequence[str],
    inside: list[Candidate],
    against: Sequence[Swap],
    rival: str,
    planned: bool,
) -> KeptGraph | Outcome:
    """The model with the rewrites ``inside`` and these modules as CUDA graphs; see ``measured``."""

    def swap(base: Sequence[Swap]) -> tuple[Swap, ...]:
        return with_graph(base, work.model, names)

    way = Way(swap, "as CUDA graphs", "replayed as CUDA graphs", RULE, ROUTE)
    swaps = SwapSet(swap(swaps_of(inside)))

    def run() -> KeptGraph | Outcome:
        verdicts = verified(work, way, swaps, inside)
        if isinstance(verdicts, Outcome):
            return verdicts
        return measured(work, way, swaps, names, inside, verdicts, against, rival, planned)

    return within_memory(work, way.as_what, [swaps], run)


def within_memory(
    work: Work, as_what: str, swaps: list[SwapSet], run: Callable[[], T]
) -> T | Outcome:
    """``run()`` within the memory that one trial may take, or that it ran out of it; then
    ``swaps`` are released. ``as_what``: as in ``Way``."""
    with limited(work.runner.device, work.config.trial_memory):
        try:
            return run()
        except Exception as error:
            if not ran_out(error):
                raise
            text = f"out of memory {as_what}: {in_line(error)}"
        for s in swaps:  # the exception held what they recorded, and is gone
            s.release()
    work.notes.append(f"a trial ended early, {text}")
    return Outcome("rejected", OUT_OF_MEMORY, text)


def verified(
    work: Work, way: Way, swaps: SwapSet, inside: list[Candidate]
) -> tuple[Verdict, ...] | Outcome:
    """How the model with these swaps, the rewrites ``inside`` among them, compares with the
    oracle. They are released where it fails."""
    verdicts = verdicts_of(work, swaps, like=SwapSet(swaps_of(inside)))
    failed = next((v for v in verdicts if not v.passed), None)
    if failed is not None:
        swaps.release()
        if code_of_verdict(failed) == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(failed.name)
        if failed.unproven:
            return Outcome("refused", NOT_FINITE, f"{failed}. {REMEDY}")
        return Outcome("rejected", "less_accurate", f"less accurate {way.as_what}: {failed}")
    return tuple(verdicts)


def measured(
    work: Work,
    way: Way,
    swaps: SwapSet,
    names: Sequence[str],
    inside: list[Candidate],
    verdicts: tuple[Verdict, ...],
    against: Sequence[Swap],
    rival: str,
    planned: bool,
) -> KeptGraph | Outcome:
    """The model with ``swaps``, verified, the rewrites ``inside`` among them, against the model
    with the swaps ``against``, which ``rival`` calls by name.

    It is kept when the step is faster beyond noise than that and than the model as it was;
    ``planned``: unless it is slower.
    """
    others = SwapSet(against)
    try:
        with work.budget:
            won = pair_of(work, swaps, others)
            pair = pair_of(work, swaps, None) if against else won
    finally:
        others.release()
    held = _allocated(work)
    swaps.release()  # what is kept records its own at the first call, in the caller's mode
    held -= _allocated(work)
    ratio = won.speedup
    facts = {
        "before_us": won.before.median_us,
        "after_us": won.after.median_us,
        "speedup": ratio.median,
        "ci95": (ratio.low, ratio.high),
    }
    text = f"{in_words(ratio)} end to end of the model {rival}"
    enough = not ratio.high < 1.0 if planned else min(ratio.low, pair.speedup.low) > _least(work)
    if not enough:
        word = "slower" if ratio.high < 1.0 else "no gain beyond noise"
        return Outcome("rejected", "slower_model", f"{word}: {text}", facts)
    if held > 0:
        text += f"; its recordings hold about {held / (1 << 20):.1f} MiB"
    outcome = Outcome("kept", "in_plan" if planned else "faster", f"{way.done}, {text}", facts)
    swapped = way.swap(swaps_of(inside))
    kind = way.rule, way.route, way.backend
    return KeptGraph(tuple(names), inside, swapped, verdicts, pair, outcome, *kind)


def settle(work: Work, name: str, gain_us: float | None, outcome: Outcome, calls: int = 1) -> None:
    """Write down what becomes of a module, ``""`` the model, as CUDA graphs."""
    work.graphs[name] = SiteOutcome(
        fqn=name,
        rule=RULE,
        activation=None,
        problem=None,
        status=outcome.status,
        code=outcome.code,
        reason=outcome.reason,
        predicted_gain_us=gain_us,
        route=ROUTE,
        calls=calls,
        **outcome.facts,
    )


def pair_of(work: Work, swaps: SwapSet, against: SwapSet | None) -> measure.Pair:
    """Interleaved times of the model with ``against``, or as it was, and with ``swaps``."""
    return measure.model_pair(
        work.model,
        swaps,
        work.runner,
        work.own_call(),
        budget_s=max(1.0, work.budget.left_s / 3),
        min_speedup=_least(work),
        against=against,
        patience_s=work.budget.left_s,
    )


def _least(work: Work) -> float:
    return max(1.0, work.config.min_speedup)


def _allocated(work: Work) -> int:
    device = work.runner.device
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
