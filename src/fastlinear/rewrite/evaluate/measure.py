"""The time budget, tuning of Problems, and before/after times of the whole model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fastlinear.core import memory
from fastlinear.core.errors import NotYetError
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.core.progress import Progress
from fastlinear.core.timing import Ratio, Samples, interleave, paired_ratio
from fastlinear.dispatch import tune as tuning
from fastlinear.dispatch.select import Choice
from fastlinear.dispatch.steps import choices_of, tuning_order
from fastlinear.families.gated import problem as gated
from fastlinear.families.gated.selection import choices_of as gated_choices
from fastlinear.families.grouped import problem as grouped
from fastlinear.families.grouped.selection import choices_of as grouped_choices
from fastlinear.families.linear import problem as linear
from fastlinear.families.linear.selection import choices_of as linear_choices
from fastlinear.families.mlp import problem as mlp
from fastlinear.families.mlp.selection import choices_of as chain_choices
from fastlinear.fastpath import lookup
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.verify.running import Runner

_MODEL_ROUNDS = (25, 125)  # the second number only if the first leaves it open
_LEAST_CALLS = 11  # of each arm in the shortest interleaved measurement
_MAX_TUNE_S = 2.0
_RESERVE = 0.5  # of the budget, for the sites' own A/B and for the whole model
_LAST_RESERVE = 0.25  # what tuning never touches, though a Problem be left untuned


class Budget:
    """Seconds left for measuring. Only what runs inside ``with budget:`` counts.

    Attributes:
        seconds: how many there are in all.
        untuned: Problems that tuning did not come to.
        no_memory: Problems whose tuning ran out of memory.
        compiling: whether what they are called through was still being compiled.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.untuned = 0
        self.no_memory = 0
        self.compiling = False
        self._spent = 0.0
        self._since: float | None = None

    def __enter__(self) -> Budget:
        self._since = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._spent += self._running()
        self._since = None

    @property
    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.seconds - self._spent - self._running())

    def share(self, parts: int, most: float) -> float:
        """An equal share of what is left for ``parts`` pieces of work, at most ``most``."""
        return min(most, self.left_s / max(1, parts))

    def _running(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since


@dataclass(frozen=True)
class Pair:
    """Interleaved times before and after, and the paired speed-up."""

    before: Samples
    after: Samples

    @property
    def speedup(self) -> Ratio:
        """before / after, with its 95% interval."""
        return paired_ratio(self.before, self.after)


def deciding(problem: Problem) -> tuple[Problem, ...]:
    """The Problems that decide about a forward Problem, in the order in which to tune them."""
    return tuning_order(problem)


def backends_of(problem: Problem, forced: str | None) -> dict[str, str]:
    """Piece → backend that the Problem's family takes for it.

    Raises UnsupportedError when the forced backend cannot serve it.
    """
    return {c.problem.piece: c.backend.name for c in choices(problem, forced)}


def choices(problem: Problem, forced: str | None) -> Sequence[Choice]:
    """What the Problem's family takes for it, a choice a piece.

    Raises UnsupportedError when the forced backend cannot serve it.
    """
    known = {
        linear.NAME: linear_choices,
        mlp.NAME: chain_choices,
        gated.NAME: gated_choices,
        grouped.NAME: grouped_choices,
    }
    return known.get(problem.family, choices_of)(problem, forced)


def tune_all(
    problems: Sequence[Problem],
    device: torch.device,
    *,
    budget: Budget,
    seed: int,
    progress: Progress,
    known: Mapping[Problem, tuning.Tuned] | None = None,
    last: bool = False,
) -> dict[Problem, tuning.Tuned]:
    """Tune what decides about every distinct Problem while the budget lasts; results are cached on
    disk. Problems the budget does not reach keep the choice dispatch makes without measuring;
    those in ``known`` are not tuned again. ``last``: nothing is measured after it.

    What takes its callers' way through the compiled lookup waits for that, as long as the budget
    allows; times without it would say little of later calls.

    Each takes at most an equal share of what is left, heaviest first, so that what a small one
    leaves over goes to the next.
    """
    asked = dict.fromkeys(q for p in problems for q in deciding(p))
    work = [q for q in asked if known is None or q not in known]
    done: dict[Problem, tuning.Tuned] = {}
    for i, problem in enumerate(work):
        progress("tune", i, len(work))
        left = budget.left_s - budget.seconds * (0.0 if last else _RESERVE)
        if budget.left_s <= budget.seconds * (0.0 if last else _LAST_RESERVE):
            budget.untuned += sum(q.dtype in FLOAT_DTYPES for q in work[i:])
            break
        if problem.dtype not in FLOAT_DTYPES:
            continue
        share = min(_MAX_TUNE_S, max(0.0, left) / (len(work) - i))
        try:
            with lookup.patience(max(0.0, left)):
                done[problem] = tuning.tune(problem, device=device, budget_s=share, seed=seed)
        except NotYetError:
            budget.untuned += 1
            budget.compiling = True
        except Exception as error:
            if not memory.ran_out(error):
                raise
            budget.no_memory += 1
    progress("tune", len(work), len(work))
    return done


def shortest_s(both_us: float) -> float:
    """Seconds of the shortest interleaved measurement of two arms that take ``both_us``."""
    return _LEAST_CALLS * both_us / 1e6


def model_pair(
    model: nn.Module,
    swaps: SwapSet,
    runner: Runner,
    call: Call,
    *,
    budget_s: float,
    min_speedup: float = 1.0,
    against: SwapSet | None = None,
    patience_s: float = lookup.PATIENCE_S,
) -> Pair:
    """A/B of the whole model: the two arms switch the same model's forwards off and on, so that
    no second copy of it is needed. Measured a second time, longer, if the first interval holds
    ``min_speedup`` and the budget allows it. The swaps are off afterwards. ``against`` are the
    swaps of the first arm; by default none: the model as it was. What is being compiled is waited
    for, at most ``patience_s``: it would disturb the times."""
    base = against or SwapSet(())

    def before() -> None:
        swaps.off()
        base.on()
        runner.told_step(model, call, "while it was timed" + (" rewritten" if base.swaps else ""))

    def after() -> None:
        base.off()
        swaps.on()
        runner.told_step(model, call, "while it was timed rewritten")

    pair = None
    lookup.settle(min(lookup.PATIENCE_S, patience_s))
    try:
        for rounds, share in zip(_MODEL_ROUNDS, (1 / 3, 2 / 3), strict=True):
            times = interleave(
                {"before": before, "after": after},
                device=runner.device,
                metric="wall",
                rounds=rounds,
                budget_s=budget_s * share,
            )
            pair = Pair(times["before"], times["after"])
            both_us = pair.before.median_us + pair.after.median_us
            if shortest_s(both_us) > budget_s * 2 / 3:
                break
            if not pair.speedup.low <= min_speedup <= pair.speedup.high:
                break
    finally:
        swaps.off()
        base.off()
    assert pair is not None
    return pair
