"""Tuning of sites, before/after times of sites, and before/after times of the whole model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.core.progress import Progress
from fastlinear.core.timing import Ratio, Samples, interleave, paired_ratio
from fastlinear.dispatch import tune as tuning
from fastlinear.dispatch.select import select
from fastlinear.ops.linear_act.backends import BACKWARD_PIECES, PIECES
from fastlinear.rewrite.rules.linear_act import Candidate
from fastlinear.rewrite.running import Call, Runner
from fastlinear.rewrite.swap import SwapSet

_SITE_ROUNDS = 31
_MODEL_ROUNDS = (25, 125)  # the second number only if the first leaves it open
_MAX_TUNE_S = 2.0
_MAX_SITE_S = 2.0


class Budget:
    """Seconds left for measuring. Only what runs inside ``with budget:`` counts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
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


def pieces(problem: Problem) -> tuple[str, ...]:
    """The pieces of a forward Problem that are chosen separately."""
    return PIECES if problem.needs_grad else ("forward",)


def backends_of(problem: Problem, forced: str | None) -> dict[str, str]:
    """Piece → backend that ``linear_act`` takes for a Problem.

    Raises UnsupportedError when the forced backend cannot serve it.
    """
    chosen = {"forward": select(problem, forced).backend.name}
    if problem.needs_grad:
        for piece in BACKWARD_PIECES:
            chosen[piece] = select(problem.with_piece(piece)).backend.name
    return chosen


def tune_all(
    problems: Sequence[Problem],
    device: torch.device,
    *,
    budget: Budget,
    seed: int,
    progress: Progress,
) -> dict[Problem, tuning.Tuned]:
    """Tune every piece of every distinct Problem while the budget lasts; results are cached on
    disk. Problems the budget does not reach keep the choice dispatch makes without measuring."""
    work = [p.with_piece(piece) for p in problems for piece in pieces(p)]
    done: dict[Problem, tuning.Tuned] = {}
    metric = "device" if device.type == "cuda" else "wall"
    reserve = budget.seconds * 0.6  # for the sites' own A/B and for the whole model
    for i, problem in enumerate(work):
        progress("tune", i, len(work))
        left = budget.left_s - reserve
        if left <= 0 or problem.dtype not in FLOAT_DTYPES:
            break
        share = min(_MAX_TUNE_S, left / (len(work) - i))
        done[problem] = tuning.tune(
            problem, device=device, metric=metric, budget_s=share, seed=seed
        )
    progress("tune", len(work), len(work))
    return done


def site_pair(candidate: Candidate, device: torch.device, budget_s: float) -> Pair:
    """A/B of one site on its own input: the model's own forward against the rewritten one."""
    arms = {
        "before": site_arm(candidate, candidate.before),
        "after": site_arm(candidate, candidate.after),
    }
    times = interleave(
        arms, device=device, metric="wall", rounds=_SITE_ROUNDS, budget_s=min(budget_s, _MAX_SITE_S)
    )
    return Pair(times["before"], times["after"])


def site_arm(candidate: Candidate, run: Callable[[Tensor], Tensor]) -> Callable[[], list[Tensor]]:
    """A callable that runs one site once: [y], and in train mode also dx, dW and db."""
    x = candidate.input()
    dtype = candidate.calls.autocast
    wanted: list[Tensor] = []
    if candidate.problem.needs_grad:
        x = x.requires_grad_(True)
        wanted = [x, *(p for p in candidate.module.parameters() if p.requires_grad)]
    state: list[Tensor] = []

    def call() -> list[Tensor]:
        with torch.set_grad_enabled(bool(wanted)), _autocast(x, dtype):
            y = run(x)
        if not wanted:
            return [y]
        if not state:
            generator = torch.Generator().manual_seed(0)
            state.append(torch.randn(y.shape, generator=generator).to(y.device, y.dtype))
        return [y.detach(), *torch.autograd.grad(y, wanted, state[0])]

    return call


def _autocast(x: Tensor, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(x.device.type, dtype)


def model_pair(
    model: nn.Module,
    swaps: SwapSet,
    runner: Runner,
    call: Call,
    *,
    budget_s: float,
    min_speedup: float = 1.0,
) -> Pair:
    """A/B of the whole model: the two arms switch the same model's forwards off and on, so that
    no second copy of it is needed. Measured a second time, longer, if the first interval holds
    ``min_speedup``. The swaps are off afterwards."""

    def before() -> None:
        swaps.off()
        runner.step(model, call)

    def after() -> None:
        swaps.on()
        runner.step(model, call)

    pair = None
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
            if not pair.speedup.low <= min_speedup <= pair.speedup.high:
                break
    finally:
        swaps.off()
    assert pair is not None
    return pair
