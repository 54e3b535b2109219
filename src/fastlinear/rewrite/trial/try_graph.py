"""Modules as CUDA graphs on trial: recorded, verified, measured end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastlinear.core.compare import Verdict
from fastlinear.core.errors import UnsupportedError
from fastlinear.profile.step import private_copy
from fastlinear.rewrite.exchange.graph_forward import GraphForward, with_graph
from fastlinear.rewrite.exchange.swap import Swap, SwapSet
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.result import SiteOutcome
from fastlinear.rewrite.trial import measure
from fastlinear.rewrite.trial.keep_accurate import verdicts_of
from fastlinear.rewrite.trial.swaps import swaps_of
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.work import Work, in_words

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
    """Modules as CUDA graphs, verified and measured.

    Attributes:
        names: the modules replayed; ``""`` is the model.
        kept: the rewrites of linears they record.
        swaps: every forward to exchange, theirs included.
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


def untouchable(work: Work, name: str) -> Outcome | None:
    """Why this module must not be exchanged, as far as can be told without running it."""
    if work.runner.device.type != "cuda":
        text = f"CUDA graphs do not exist on {work.runner.device}."
        return Outcome("refused", "needs_cuda", text)
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
    try:
        work.runner.step(work.model, copy_of_call(work))
    except UnsupportedError as error:
        return Outcome("refused", "no_graph", str(error))
    except Exception as error:  # noqa: BLE001  out of memory, say: an outcome too
        text = f"recording raises {type(error).__name__}: {error}"
        return Outcome("rejected", "raises", text)
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
    """The model with the rewrites ``inside`` and these modules as CUDA graphs, against the model
    with the swaps ``against``, which ``rival`` calls by name.

    It is kept when it is verified and the step is faster beyond noise than that and than the
    model as it was; ``planned``: unless it is slower.
    """
    base = swaps_of(inside)
    plain, swaps = SwapSet(base), SwapSet(with_graph(base, work.model, names))
    verdicts = verdicts_of(work, swaps, like=plain)
    failed = next((v for v in verdicts if not v.passed), None)
    if failed is not None:
        swaps.release()
        return Outcome("rejected", "less_accurate", f"less accurate as CUDA graphs: {failed}")
    others = SwapSet(against)
    with work.budget:
        won = _pair(work, swaps, others)
        pair = _pair(work, swaps, None) if against else won
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
    text = f"replayed as CUDA graphs, {text}"
    outcome = Outcome("kept", "in_plan" if planned else "faster", text, facts)
    exchanged = with_graph(base, work.model, names)
    return KeptGraph(tuple(names), inside, exchanged, tuple(verdicts), pair, outcome)


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


def copy_of_call(work: Work) -> Call:
    """The inputs copied: some models write to them."""
    return Call(*private_copy((work.call.args, work.call.kwargs)))


def _pair(work: Work, swaps: SwapSet, against: SwapSet | None) -> measure.Pair:
    return measure.model_pair(
        work.model,
        swaps,
        work.runner,
        copy_of_call(work),
        budget_s=max(1.0, work.budget.left_s / 3),
        min_speedup=_least(work),
        against=against,
    )


def _least(work: Work) -> float:
    return max(1.0, work.config.min_speedup)


def _allocated(work: Work) -> int:
    device = work.runner.device
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
