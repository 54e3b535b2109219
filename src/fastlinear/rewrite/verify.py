"""Is the rewritten model as accurate as the original? Both are judged against an oracle.

A result passes when ``err(rewritten) <= 2 * err(original) + tiny``, errors taken as the root mean
square over all input draws. Gradients that fail are judged once more against the oracle on each
run's own side of every kink (see ``rewrite.kinks``).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fastlinear.core.compare import Verdict
from fastlinear.rewrite.kinks import Sides, on_own_sides
from fastlinear.rewrite.oracle import Oracle
from fastlinear.rewrite.running import Call, Ran, Runner, draw, run_once
from fastlinear.rewrite.swap import SwapSet
from fastlinear.rewrite.trajectory import learning_rate, trajectory
from fastlinear.rewrite.verdicts import compare_all, pool

_MORE_DRAWS = 3
_KEEP_BYTES = 1 << 28

Run = Callable[[nn.Module, Call], dict[str, Tensor]]
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
        self._steps: _Steps | None = None

    def verdicts(self, swaps: SwapSet) -> list[Verdict]:
        """One verdict for each result, pooled over the draws; failures get a second look on
        more draws before they count."""
        found: Draws = {}
        end = time.monotonic() + self.seconds
        for i in range(self.draws):
            if i > 0 and time.monotonic() > end:
                self.skipped.append(f"draws {i} to {self.draws - 1} (out of time)")
                break
            self._collect(i, swaps, found)
        if _may_be_chance(found):
            for i in list(found):
                self._follow(i, swaps, found)
        if _may_be_chance(found):
            for i in range(self.draws, self.draws + _MORE_DRAWS):
                self._collect(i, swaps, found)
                self._follow(i, swaps, found)
        return _pooled(found)

    def _collect(self, index: int, swaps: SwapSet, found: Draws) -> None:
        known = self._originals(index)
        if known is None:
            return
        theirs = known.theirs
        swaps.on()
        try:
            ran = run_once(self.model, draw(self.call, index, self.runner.seed), self.runner)
        except Exception as error:  # noqa: BLE001  whatever it is, the model alone does not raise it
            name = f"the rewritten model raises {type(error).__name__}: {error}"
            found[index] = {name: Verdict(name, math.inf, 0.0, 0.0)}
            return
        finally:
            swaps.off()
        states = zip(ran.state, theirs.state, strict=True)
        same = all(bool((a == b).all()) for a, b in states)
        found[index] = {"randomness": Verdict("randomness", 0.0 if same else math.inf, 0.0, 0.0)}
        found[index] |= compare_all(ran.results, theirs.results, known.oracle)

    def _follow(self, index: int, swaps: SwapSet, found: Draws) -> None:
        """Judge a draw whose gradients fail again, on each run's own side of every kink."""
        first = found.get(index, {})
        if any(n.startswith("grad.") and not v.passed for n, v in first.items()):
            call = draw(self.call, index, self.runner.seed)
            again = self._on_own_sides(swaps, call, self.runner.results)
            if again is not None:
                found[index] = first | again

    def _on_own_sides(self, swaps: SwapSet, call: Call, run: Run) -> dict[str, Verdict] | None:
        """Verdicts on ``run`` with and without swaps, each against the oracle on its own side of
        every kink; None where no kink is seen or the oracle cannot follow."""
        torchs, own = Sides(), Sides()
        with torchs:
            theirs = run(self.model, call)
        if not torchs.outputs:
            return None
        swaps.on()
        try:
            with own:
                ours = run(self.model, call)
        finally:
            swaps.off()
        exact = on_own_sides(own, torchs, lambda: self.oracle.run(self.model, call, run))
        return None if exact is None else compare_all(ours, theirs, *exact)

    def _originals(self, index: int) -> _Known | None:
        if index in self._known:
            return self._known[index]
        call = draw(self.call, index, self.runner.seed)
        try:
            theirs = run_once(self.model, call, self.runner)
            known = _Known(theirs, self.oracle.run(self.model, call, self.runner.results))
        except Exception as error:
            if index == 0:
                raise
            # a random input may be one that the model does not accept
            self.skipped.append(f"draw {index} ({type(error).__name__}: {error})")
            self._known[index] = None
            return None
        self._keep(index, known)
        return known

    def _keep(self, index: int, known: _Known) -> None:
        held = (*known.theirs.results.values(), *known.oracle.values())
        if sum(t.nbytes for t in held) < _KEEP_BYTES:
            self._known[index] = known

    def trajectory(self, swaps: SwapSet, steps: int) -> list[Verdict]:
        """A few SGD steps on copies: losses and parameters of original, rewritten and oracle.
        Empty where no parameter is trained."""
        if not any(p.requires_grad for p in self.model.parameters()):
            return []
        if self._steps is None:
            rate = learning_rate(self.model, self.runner, self.call)
            run = self._stepping(steps, rate)
            exact = self.oracle.run(self.model, self.call, run)
            self._steps = _Steps(run, run(self.model, self.call), exact)
        known = self._steps
        swaps.on()
        try:
            ours = known.run(self.model, self.call)
        finally:
            swaps.off()
        found = compare_all(ours, known.theirs, known.exact)
        if not all(v.passed for v in found.values()):
            found |= self._on_own_sides(swaps, self.call, known.run) or {}
        return list(found.values())

    def _stepping(self, steps: int, rate: float) -> Run:
        runner = self.runner
        return lambda model, call: trajectory(copy.deepcopy(model), runner, call, steps, rate)


@dataclass(frozen=True)
class _Known:
    theirs: Ran
    oracle: dict[str, Tensor]


@dataclass(frozen=True)
class _Steps:
    run: Run
    theirs: dict[str, Tensor]
    exact: dict[str, Tensor]


def _pooled(found: Draws) -> list[Verdict]:
    names = dict.fromkeys(n for verdicts in found.values() for n in verdicts)
    return [pool(n, [v[n] for v in found.values() if n in v]) for n in names]


def _may_be_chance(found: Draws) -> bool:
    """Whether something failed, but by a finite error."""
    failed = [v for v in _pooled(found) if not v.passed]
    return bool(failed) and not any(math.isinf(v.error) for v in failed)


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
