"""The model through ``torch.compile``, with the rewrites inside or without them: offered where much
pointwise work lies between the linears; tried where asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from fastlinear.core.compare import Verdict
from fastlinear.profile.between import CODE
from fastlinear.profile.launch_bound import LAUNCH_BOUND
from fastlinear.rewrite.exchange.compiled_forward import (
    DEFAULT,
    REDUCE_OVERHEAD,
    CompiledForward,
    with_compiled,
)
from fastlinear.rewrite.exchange.swap import Swap, SwapSet
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.result import SiteOutcome
from fastlinear.rewrite.trial.swaps import swaps_of
from fastlinear.rewrite.trial.try_graph import (
    KeptGraph,
    Outcome,
    Way,
    copy_of_call,
    measured,
    pair_of,
    verified,
)
from fastlinear.rewrite.verify.inputs import Call, draw
from fastlinear.rewrite.work import Work

RULE = "compiled"
ROUTE = "compile"
_LINE = 200  # characters of an error worth showing


@dataclass(frozen=True)
class _Arm:
    """The model compiled in one way, verified."""

    inside: list[Candidate]
    swaps: SwapSet
    way: Way
    verdicts: tuple[Verdict, ...]


def choose_compiled(
    work: Work, kept: list[Candidate], best: KeptGraph | None, *, planned: str | None = None
) -> KeptGraph | None:
    """The model compiled, if that is faster beyond noise than what is kept so far.

    It is compiled with the rewrites and without them, and the faster of the two is what competes.
    Without ``Config.compile`` it is only offered, in a note.

    Args:
        work: the optimization under way; outcomes and notes are added to it.
        kept: the rewrites of linears kept so far.
        best: CUDA graphs kept so far.
        planned: the mode that a plan asks for; it stays unless it is slower.
    """
    if not work.config.compile:
        _note(work)
        return None
    found: KeptGraph | Outcome | None = untouchable(work.model)
    if found is None:
        against = swaps_of(kept) if best is None else best.swaps
        rival = "with the other rewrites but not compiled" if kept else "as it was"
        rival = rival if best is None else "as CUDA graphs"
        inside = kept if best is None else best.kept
        for mode in (planned,) if planned is not None else _modes(work):
            found = _tried(work, inside, mode, against, rival, planned is not None)
            if isinstance(found, KeptGraph):
                break
    assert found is not None
    outcome = found.outcome if isinstance(found, KeptGraph) else found
    _settle(work, outcome)
    if not isinstance(found, KeptGraph):
        return None
    for name in () if best is None else best.names:
        known = work.graphs[name]
        text = "slower than the model compiled"
        work.graphs[name] = replace(known, status="rejected", code="compiled_instead", reason=text)
    for c in kept if not found.kept else []:
        text = "slower than the whole model compiled without it"
        work.settle(c.fqn, "rejected", "compiled_alone", text)
    _note_graphs(work, found)
    return found


def untouchable(model: nn.Module) -> Outcome | None:
    """Why this model must not be compiled, as far as can be told without doing it."""
    refusal = refuse_module(model)
    if refusal is not None:
        return Outcome("refused", refusal.code, refusal.reason)
    if isinstance(model.__dict__.get("forward"), CompiledForward):
        return Outcome("nothing_to_do", "already_rewritten", "It is compiled already.")
    if any(type(m).__name__ == "OptimizedModule" for m in model.modules()):
        return Outcome("refused", "already_compiled", "It holds a module compiled by its owner.")
    return None


def _modes(work: Work) -> tuple[str, ...]:
    """Replayed as CUDA graphs first, where those are asked for and nothing needs a gradient."""
    replayed = work.config.graphs and work.runner.device.type == "cuda"
    if replayed and work.config.mode == "inference":
        return REDUCE_OVERHEAD, DEFAULT
    return (DEFAULT,)


def _tried(
    work: Work,
    kept: list[Candidate],
    mode: str,
    against: Sequence[Swap],
    rival: str,
    planned: bool,
) -> KeptGraph | Outcome:
    """The model compiled in one mode, with the rewrites or, if that is faster, without them."""
    arm = _arm(work, kept, mode)
    if kept and not planned:
        alone = _arm(work, [], mode)
        if isinstance(arm, _Arm) and isinstance(alone, _Arm):
            with work.budget:
                slower = pair_of(work, arm.swaps, alone.swaps).speedup.high < 1.0
            (alone if not slower else arm).swaps.release()
            arm = alone if slower else arm
        elif isinstance(alone, _Arm):
            arm = alone
    if isinstance(arm, Outcome):
        return arm
    chosen = arm.way, arm.swaps, ("",), arm.inside, arm.verdicts
    return measured(work, *chosen, against, rival, planned)


def _arm(work: Work, inside: list[Candidate], mode: str) -> _Arm | Outcome:
    exchanged = with_compiled(swaps_of(inside), work.model, mode)
    swaps = SwapSet(exchanged)
    start = time.monotonic()
    told = _compiled(work, swaps)
    if isinstance(told, Outcome):
        return told
    seconds = time.monotonic() - start
    done = f"compiled ({mode}) {'with the other rewrites' if inside else 'by itself'}, {told}"
    way = Way(lambda _: exchanged, "compiled", done, RULE, ROUTE, mode)
    verdicts = verified(work, way, swaps, inside)
    if isinstance(verdicts, Outcome):
        return verdicts
    work.notes.append(
        f"compiling took about {seconds:.0f} s, which the first call of each process and of each "
        "new input shape takes again, less what torch caches on disk"
    )
    return _Arm(inside, swaps, way, verdicts)


def _compiled(work: Work, swaps: SwapSet) -> str | Outcome:
    """How many graphs the model became, or why it is not to be compiled.

    Three steps: one compiles; a second may once more (what the first wrote changes a guard); where
    the third, on other values of the same shapes, compiles again, every call may.
    """
    graphs, breaks = _graphs(), _breaks()
    swaps.on()
    try:
        work.runner.step(work.model, copy_of_call(work))
        work.runner.step(work.model, copy_of_call(work))
        made, broken, seen = _graphs() - graphs, _breaks() - breaks, _graphs()
        again = draw(work.call, 1, work.runner.seed)
        if _accepts(work, swaps, again):
            work.runner.step(work.model, again)
    except Exception as error:  # noqa: BLE001  no compiler, an op it cannot serve: an outcome too
        text = f"torch.compile raises {type(error).__name__}: {' '.join(str(error).split())}"
        return Outcome("refused", "no_compile", text[:_LINE])
    finally:
        swaps.off()
    if made == 0:
        return Outcome("refused", "no_compile", "torch.compile finds nothing in it to compile.")
    if _graphs() > seen:
        text = "Dynamic: it compiles anew for other values of inputs of the same shapes."
        return Outcome("refused", "dynamic", text)
    return "in one graph" if made == 1 else f"in {made} graphs ({broken} graph breaks)"


def _accepts(work: Work, swaps: SwapSet, call: Call) -> bool:
    """Whether the model as it was takes these inputs: random ones may be none of its."""
    swaps.off()
    try:
        work.runner.step(work.model, call)
    except Exception:  # noqa: BLE001  the model's own affair
        return False
    finally:
        swaps.on()
    return True


def _graphs() -> int:
    from torch._dynamo.utils import counters  # Dynamo takes a second to import

    return int(counters["stats"]["unique_graphs"])


def _breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def _settle(work: Work, outcome: Outcome) -> None:
    finding = next((f for f in work.profile.findings if f.code == CODE), None)
    work.compiled = SiteOutcome(
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


def _note_graphs(work: Work, found: KeptGraph) -> None:
    """Say that a compiled model whose launches set the pace can be replayed as well."""
    replayable = work.runner.device.type == "cuda" and work.config.mode == "inference"
    left = found.pair.after.median_us - work.profile.device_busy_us
    if replayable and not work.config.graphs and left > LAUNCH_BOUND * found.pair.after.median_us:
        work.notes.append(
            f"compiled, the host still leaves the device idle for about {left:.0f} us a step: "
            "Config(graphs=True, compile=True) replays what was compiled as CUDA graphs"
        )


def _note(work: Work) -> None:
    """Say what fusing the pointwise work could save, without compiling anything."""
    finding = next((f for f in work.profile.findings if f.code == CODE), None)
    if finding is None or untouchable(work.model) is not None:
        return
    work.notes.append(
        f"pointwise work between the linears takes {finding.details['share']:.0%} of the time; "
        f"torch.compile would save up to {finding.predicted_gain_us:.0f} us a step of it: ask for "
        "it with Config(compile=True) or --compile (compiling takes a while)"
    )
