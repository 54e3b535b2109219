"""Is the rewritten model as accurate as the original? Both are judged against an oracle.

A result passes when ``err(rewritten) <= 2 * err(original) + tiny``, errors taken as the root mean
square over all input draws. The oracle takes the original's side of every kink, and where the
rewritten model fails by that, the rewritten model's (see ``rewrite.kinks``).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from fastlinear.core.compare import Verdict
from fastlinear.core.interrupts import whole
from fastlinear.profile.raised import PASSED_ON, raised, told
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.verify.inputs import Call, draw
from fastlinear.rewrite.verify.kinks import Sides, following
from fastlinear.rewrite.verify.oracle import Oracle, Run
from fastlinear.rewrite.verify.roundings import RUNS, OtherRoundings, Spread, spreads
from fastlinear.rewrite.verify.running import KEEP_BYTES, Ran, Runner, random_state, run_once
from fastlinear.rewrite.verify.trajectory import learning_rate, trajectory
from fastlinear.rewrite.verify.verdicts import (
    GRADIENTS,
    LOSSES,
    STEPS,
    compare_all,
    pool,
    together,
)

_MORE_DRAWS = 3
_DRAWN = "random numbers drawn"

Draws = dict[int, dict[str, Verdict]]


class Judge:
    """Compares the model with and without swaps on several input draws.

    The original's and the oracle's results are computed once per draw and kept while small.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        call: Call,
        *,
        draws: int,
        oracle: Oracle,
        seconds: float,
        ran: Ran,
        exact: dict[str, Tensor] | None,
    ) -> None:
        """``ran`` and ``exact``: the model's and, if known, the oracle's results on ``call``."""
        self.model, self.runner, self.oracle = model, runner, oracle
        self.call, self.draws = call, draws
        self.seconds = seconds
        self.skipped: list[str] = []
        self._known: dict[int, _Known | None] = {}
        if exact is not None:
            self._keep(0, _Known(ran, exact))
        self._steps: dict[int, tuple[Run, _Known] | None] = {}
        self._spread: dict[int, Spread] = {}
        self._step_spread: dict[int, Spread] = {}

    def verdicts(self, swaps: SwapSet, like: SwapSet | None = None) -> list[Verdict]:
        """One verdict for each result, pooled over the draws; failures get a second look on
        more draws before they count. ``like``: swaps that compute the same and can be watched
        (see ``kinks.Sides``), where these, replayed as a graph, cannot."""
        found: Draws = {}
        end = time.monotonic() + self.seconds
        for i in range(self.draws):
            if i > 0 and time.monotonic() > end:
                self.skipped.append(f"draws {i} to {self.draws - 1} (out of time)")
                break
            self._collect(i, swaps, found, like)
        if _may_be_chance(found):
            for i in range(self.draws, self.draws + _MORE_DRAWS):
                self._collect(i, swaps, found, like)
        if not self._spread and _may_be_noise(found, GRADIENTS):
            self._spread = spreads(self._cases(found, self._drawn, end), GRADIENTS)
            found = {}
            for i in self._spread:
                self._collect(i, swaps, found, like)
        return _pooled(found, self._spread)

    def _collect(self, index: int, swaps: SwapSet, found: Draws, like: SwapSet | None) -> None:
        known = self._originals(index)
        if known is None:
            return
        theirs = known.theirs
        call = draw(self.call, index, self.runner.seed)
        try:
            ran = self._ran(call, swaps, like)
        except Exception as error:  # noqa: BLE001  whatever it is, the model alone does not raise it
            verdict = _raised(error)
            found[index] = {verdict.name: verdict}
            return
        states = zip(ran.state, theirs.state, strict=True)
        same = all(torch.equal(a, b) for a, b in states)
        found[index] = {_DRAWN: Verdict(_DRAWN, 0.0 if same else math.inf, 0.0, 0.0)}
        spread = self._spread.get(index)
        found[index] |= self._compared(ran, known, call, self.runner.results, spread)

    def _ran(self, call: Call, swaps: SwapSet, like: SwapSet | None) -> Ran:
        if like is None:
            with _on(swaps):
                return run_once(self.model, call, self.runner)
        with _on(like):
            sides = run_once(self.model, call, self.runner).sides
        with _on(swaps):
            results = self.runner.results(self.model, call)
        return Ran(results, random_state(self.runner.device), sides)

    def _compared(
        self,
        ours: Ran,
        known: _Known,
        call: Call,
        run: Run,
        spread: Spread | None,
    ) -> dict[str, Verdict]:
        """``ours`` against the oracle on the original's side of every kink, else on its own."""
        theirs = known.theirs
        found = compare_all(ours.results, theirs.results, known.oracle, spread=spread)
        if theirs.sides and not all(v.passed for v in found.values()):
            with told(self.runner.function, self.model, f"where the {self.oracle.name} ran again"):
                exact = self.oracle.run_like(theirs, self.model, call, run, ours)
            pair = exact, known.oracle
            found = compare_all(ours.results, theirs.results, *pair, spread=spread)
        return found

    def _cases(
        self, indices: Iterable[int], taken: Callable[[int], _Taken | None], end: float
    ) -> Iterator[tuple[int, dict[str, Tensor], Iterator[dict[str, Tensor]]]]:
        """What ``spreads`` asks for, while there is time and for the first index in any case."""
        for n, i in enumerate(list(indices)):
            if n > 0 and time.monotonic() > end:
                return
            if (case := taken(i)) is not None:
                yield i, case[1].oracle, self._otherwise(*case)

    def _otherwise(self, run: Run, known: _Known, call: Call) -> Iterator[dict[str, Tensor]]:
        """PyTorch's results on one call, and those with other roundings on the same side of every
        kink."""
        yield known.theirs.results
        for i in range(RUNS):
            rounded = OtherRoundings(self.runner.seed + i)

            def once(rounded: OtherRoundings = rounded) -> dict[str, Tensor]:
                with rounded:
                    return run(self.model, call)

            try:
                sides = known.theirs.sides
                found = following(sides, sides, once) if sides else None
                yield once() if found is None else found
            except Exception as error:  # noqa: BLE001  its code may depend on every bit
                self.skipped.append(f"other roundings ({type(error).__name__}: {error})")

    def _drawn(self, index: int) -> _Taken | None:
        known = self._originals(index)
        if known is None:
            return None
        return self.runner.results, known, draw(self.call, index, self.runner.seed)

    def _originals(self, index: int) -> _Known | None:
        if index in self._known:
            return self._known[index]
        try:
            call = draw(self.call, index, self.runner.seed)
            theirs = run_once(self.model, call, self.runner)
            exact = self.oracle.run_like(theirs, self.model, call, self.runner.results)
            known = _Known(theirs, exact)
        except Exception as error:
            if index == 0:
                if isinstance(error, PASSED_ON):
                    raise
                doing = "where the model itself ran to be compared with"
                raise raised(self.runner.function, self.model, doing, error) from error
            # a random input may be one that the model does not accept
            self.skipped.append(f"draw {index} ({type(error).__name__}: {error})")
            self._known[index] = None
            return None
        self._keep(index, known)
        return known

    def _keep(self, index: int, known: _Known) -> None:
        held = (*known.theirs.results.values(), *known.theirs.sides, *known.oracle.values())
        if sum(t.nbytes for t in held) < KEEP_BYTES:
            self._known[index] = known

    def trajectory(
        self,
        swaps: SwapSet,
        steps: int,
        like: SwapSet | None = None,
    ) -> list[Verdict]:
        """A few SGD steps on copies: losses and parameters of original, rewritten and oracle.
        Empty where no parameter is trained, or where the model does not allow it. Failures get a
        second look on steps with other inputs, pooled as in ``verdicts``: all errors of one
        trajectory go back to the same first roundings. ``like`` as there."""
        found: Draws = {}
        self._follow(0, swaps, steps, found, like)
        end = time.monotonic() + self.seconds
        if _may_be_chance(found):
            for i in range(1, 1 + _MORE_DRAWS):
                self._follow(i, swaps, steps, found, like)
        if not self._step_spread and _may_be_noise(found, STEPS):
            cases = self._cases(found, partial(self._stepped, steps), end)
            self._step_spread = spreads(cases, STEPS)
            found = {}
            for i in self._step_spread:
                self._follow(i, swaps, steps, found, like)
        return _pooled(found, self._step_spread)

    def _follow(
        self,
        index: int,
        swaps: SwapSet,
        steps: int,
        found: Draws,
        like: SwapSet | None,
    ) -> None:
        taken = self._stepped(steps, index)
        if taken is None:
            return
        run, known, call = taken
        try:
            with _on(like or swaps):
                ours = _watched(run, self.model, call)
            if like is not None:
                with _on(swaps):
                    ours = replace(ours, results=run(self.model, call))
        except Exception as error:  # noqa: BLE001  whatever it is, the model alone does not raise it
            verdict = _raised(error)
            found[index] = {verdict.name: verdict}
            return
        spread = self._step_spread.get(index)
        found[index] = self._compared(ours, known, call, run, spread)

    def _stepped(self, steps: int, index: int) -> _Taken | None:
        first = self._steps[index] if index in self._steps else self._first_steps(index, steps)
        if first is None or first[1].theirs.light().whole:
            self._steps[index] = first
        return None if first is None else (*first, draw(self.call, index, self.runner.seed))

    def _first_steps(self, index: int, steps: int) -> tuple[Run, _Known] | None:
        """How to take the steps, and the original's and the oracle's, if there are any."""
        if not any(p.requires_grad for p in self.model.parameters()):
            return None
        try:
            call = draw(self.call, index, self.runner.seed)
            run = self._stepping(steps, learning_rate(self.model, self.runner, call))
            theirs = _watched(run, self.model, call)
            exact = self.oracle.run_like(theirs, self.model, call, run)
        except Exception as error:  # noqa: BLE001  no copies, other weights…: the model's own affair
            of = f" of draw {index}" if index else ""
            self.skipped.append(f"optimizer steps{of} ({type(error).__name__}: {error})")
            return None
        return run, _Known(theirs, exact)

    def _stepping(self, steps: int, rate: float) -> Run:
        runner = self.runner
        return lambda model, call: trajectory(copy.deepcopy(model), runner, call, steps, rate)


@dataclass(frozen=True)
class _Known:
    theirs: Ran
    oracle: dict[str, Tensor]


_Taken = tuple[Run, _Known, Call]  # how results are taken, PyTorch's and the oracle's, of what


@whole
def _on(swaps: SwapSet) -> Iterator[None]:
    swaps.on()
    try:
        yield
    finally:
        swaps.off()


def _raised(error: Exception) -> Verdict:
    name = f"the rewritten model raises {type(error).__name__}: {error}"
    return Verdict(name, math.inf, 0.0, 0.0)


def _watched(run: Run, model: nn.Module, call: Call) -> Ran:
    with Sides() as sides:
        results = run(model, call)
    return Ran(results, (), tuple(sides.outputs))


def _pooled(found: Draws, spread: dict[int, Spread] | None = None) -> list[Verdict]:
    """One verdict for each result; ``spread``: what rounding does to each draw's, if measured."""
    names = dict.fromkeys(n for verdicts in found.values() for n in verdicts)
    pooled = []
    for n in names:
        alone = bool(spread) and n.startswith((GRADIENTS, STEPS)) and n not in LOSSES
        pooled.append(pool(n, [v[n] for v in found.values() if n in v], alone))
    return together(pooled)


def _may_be_chance(found: Draws) -> bool:
    """Whether something failed, but by a finite error."""
    failed = [v for v in _pooled(found) if not v.passed and not v.unproven]
    return bool(failed) and not any(math.isinf(v.error) for v in failed)


def _may_be_noise(found: Draws, prefix: str) -> bool:
    """Whether nothing failed but results of this kind, by finite errors."""
    failed = [v for v in _pooled(found) if not v.passed]
    return _may_be_chance(found) and all(
        v.name.startswith(prefix) and v.name not in LOSSES for v in failed
    )


def keep_passing(
    units: Sequence[str], passes: Callable[[Sequence[str]], bool], out_of_time: Callable[[], bool]
) -> list[str]:
    """A large subset of units that passes, found by halving. Empty when time runs out."""
    if not units or out_of_time():
        return []
    if passes(units):
        return list(units)
    if len(units) == 1:
        return []
    half = len(units) // 2
    first = keep_passing(units[:half], passes, out_of_time)
    second = keep_passing(units[half:], passes, out_of_time)
    if not first or not second:
        return first or second
    both = [*first, *second]
    return both if passes(both) else first
