"""Modules through ``torch.compile`` on trial: what becomes of them, and whether it is right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fastlinear.core.compare import Verdict
from fastlinear.core.memory import check, ran_out
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.evaluate.try_graph import Outcome, Way, verified
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.swap.compiled_forward import CompiledForward, with_compiled
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.verify.inputs import Call, draw
from fastlinear.rewrite.work import Work

RULE = "compiled"
ROUTE = "compile"
_LINE = 200  # characters of an error worth showing


@dataclass(frozen=True)
class Arm:
    """Modules compiled in one way, verified.

    Attributes:
        names: the modules; ``""`` is the model.
        inside: the rewrites of linears inside.
        swaps, way: how they are swapped.
        verdicts: how the model compares with the oracle.
    """

    names: tuple[str, ...]
    inside: list[Candidate]
    swaps: SwapSet
    way: Way
    verdicts: tuple[Verdict, ...]


def untouchable(module: nn.Module) -> Outcome | None:
    """Why this module must not be compiled, as far as can be told without doing it."""
    refusal = refuse_module(module)
    if refusal is not None:
        return Outcome("refused", refusal.code, refusal.reason)
    if isinstance(module.__dict__.get("forward"), CompiledForward):
        return Outcome("nothing_to_do", "already_rewritten", "It is compiled already.")
    if any(type(m).__name__ == "OptimizedModule" for m in module.modules()):
        return Outcome("refused", "already_compiled", "It holds a module compiled by its owner.")
    return None


def compiled_arm(
    work: Work,
    inside: list[Candidate],
    mode: str,
    names: Sequence[str] = ("",),
    made: list[SwapSet] | None = None,
) -> Arm | Outcome:
    """Compile these modules with the rewrites ``inside``, and verify what that gives. Its swaps
    are added to ``made``."""
    swapped = with_compiled(swaps_of(inside), work.model, mode, names)
    swaps = SwapSet(swapped)
    if made is not None:
        made.append(swaps)
    start = time.monotonic()
    told = _compiled(work, swaps)
    check()
    if isinstance(told, Outcome):
        return told
    seconds = time.monotonic() - start
    with_what = "with the other rewrites" if inside else "by itself"
    done = f"compiled ({mode}) {with_what} in {seconds:.0f} s, {told}"
    way = Way(lambda _: swapped, "compiled", done, RULE, ROUTE, mode)
    verdicts = verified(work, way, swaps, inside)
    if isinstance(verdicts, Outcome):
        return verdicts
    return Arm(tuple(names), inside, swaps, way, verdicts)


def _compiled(work: Work, swaps: SwapSet) -> str | Outcome:
    """How many graphs the model became, or why it is not to be compiled.

    Three steps: one compiles; a second may once more (what the first wrote changes a guard); where
    the third, on other values of the same shapes, compiles again, every call may.
    """
    graphs, breaks = _graphs(), _breaks()
    swaps.on()
    try:
        work.runner.step(work.model, work.own_call())
        work.runner.step(work.model, work.own_call())
        made, broken, seen = _graphs() - graphs, _breaks() - breaks, _graphs()
        again = draw(work.call, 1, work.runner.seed)
        if _accepts(work, swaps, again):
            work.runner.step(work.model, again)
    except Exception as error:
        if ran_out(error):
            raise
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
