"""Is the rewritten model as accurate as the original? Both are judged against an oracle.

A result passes when ``err(rewritten) <= 2 * err(original) + tiny``, errors taken as the root mean
square over all input draws.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastlinear.core.compare import DEFAULT_FACTOR, Verdict, judge, relative_error, unit_rounding
from fastlinear.rewrite.oracle import Oracle, double
from fastlinear.rewrite.running import Call, Ran, Runner, draw, run_once
from fastlinear.rewrite.swap import SwapSet

_NOISE_FLOOR = 64.0  # a gradient below this many roundings of all gradients together may be noise
_NOISE_ERROR = 0.5  # and is, where PyTorch itself gets half of it wrong
_MORE_DRAWS = 3
_KEEP_BYTES = 1 << 28
_STEP = 1e-2  # one SGD step moves the parameters by this fraction of their norm


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
    ) -> None:
        self.model, self.runner, self.oracle = model, runner, oracle
        self.call, self.draws = call, draws
        self.seconds = seconds
        self.skipped: list[str] = []
        self._known: dict[int, _Known | None] = {}
        if oracle.first is not None:
            self._keep(0, _Known(ran, oracle.first))
        self._steps: _Steps | None = None

    def verdicts(self, swaps: SwapSet) -> list[Verdict]:
        """One verdict for each result, pooled over the draws; failures get a second look on
        more draws before they count."""
        found: dict[str, list[Verdict]] = {}
        end = time.monotonic() + self.seconds
        for i in range(self.draws):
            if i > 0 and time.monotonic() > end:
                self.skipped.append(f"draws {i} to {self.draws - 1} (out of time)")
                break
            self._collect(i, swaps, found)
        failed = {n for n, v in found.items() if not _pool(n, v).passed}
        if failed and not any(math.isinf(_pool(n, found[n]).error) for n in failed):
            for i in range(self.draws, self.draws + _MORE_DRAWS):
                self._collect(i, swaps, found)
        return [_pool(name, each) for name, each in found.items()]

    def _collect(self, index: int, swaps: SwapSet, found: dict[str, list[Verdict]]) -> None:
        known = self._originals(index)
        if known is None:
            return
        theirs, oracle = known.theirs.results, known.oracle
        swaps.on()
        try:
            ran = run_once(self.model, draw(self.call, index, self.runner.seed), self.runner)
        except Exception as error:  # noqa: BLE001  whatever it is, the model alone does not raise it
            name = f"the rewritten model raises {type(error).__name__}: {error}"
            found.setdefault(name, []).append(Verdict(name, math.inf, 0.0, 0.0))
            return
        finally:
            swaps.off()
        ours = ran.results
        states = zip(ran.state, known.theirs.state, strict=True)
        same = all(torch.equal(a, b) for a, b in states)
        found.setdefault("randomness", []).append(
            Verdict("randomness", 0.0 if same else math.inf, 0.0, 0.0)
        )
        grads = [o for n, o in oracle.items() if n.startswith("grad.")]
        scale = math.hypot(*(float(torch.linalg.vector_norm(g.double())) for g in grads))
        for name, theirs_value in theirs.items():
            verdict = _compare(name, ours.get(name), theirs_value, oracle.get(name), scale)
            found.setdefault(name, []).append(verdict)

    def _originals(self, index: int) -> _Known | None:
        if index in self._known:
            return self._known[index]
        call = draw(self.call, index, self.runner.seed)
        try:
            theirs = run_once(self.model, call, self.runner)
            known = _Known(theirs, self.oracle.results(self.model, self.runner, call))
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
        """A few SGD steps on copies: losses and parameters of original, rewritten and oracle."""
        runner, call = self.runner, self.call
        if self._steps is None:
            rate = _learning_rate(self.model, runner, call)
            theirs = _trajectory(copy.deepcopy(self.model), runner, call, steps, rate)
            self._steps = _Steps(rate, theirs, self._exact_trajectory(steps, rate))
        rate, theirs, exact = self._steps.rate, self._steps.theirs, self._steps.exact
        swaps.on()
        try:
            ours = _trajectory(copy.deepcopy(self.model), runner, call, steps, rate)
        finally:
            swaps.off()
        return [judge(n, ours[n], theirs[n], exact[n]) for n in theirs]

    def _exact_trajectory(self, steps: int, rate: float) -> dict[str, Tensor]:
        oracle, runner, call = self.oracle, self.runner, self.call
        if oracle.model is not None:
            wide = copy.deepcopy(oracle.model)
            return _trajectory(wide, runner, call.map(double), steps, rate)
        oracle.swaps.on()
        try:
            return _trajectory(copy.deepcopy(self.model), runner, call, steps, rate)
        finally:
            oracle.swaps.off()


@dataclass(frozen=True)
class _Known:
    theirs: Ran
    oracle: dict[str, Tensor]


@dataclass(frozen=True)
class _Steps:
    rate: float
    theirs: dict[str, Tensor]
    exact: dict[str, Tensor]


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


def _trajectory(
    model: nn.Module, runner: Runner, call: Call, steps: int, rate: float
) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for i in range(steps):
        results = Runner(runner.mode, runner.loss_fn, runner.device, runner.seed + i).results(
            model, call
        )
        losses.append(results["loss"].reshape(()))
        for name, parameter in model.named_parameters():
            parameter.grad = results.get(f"grad.{name}")
        optimizer.step()
    found = {"optimizer steps: losses": torch.stack(losses)}
    found |= {f"optimizer steps: {n}": p.detach() for n, p in model.named_parameters()}
    return found


def _learning_rate(model: nn.Module, runner: Runner, call: Call) -> float:
    results = runner.results(model, call)
    size = grad = 0.0
    for name, parameter in model.named_parameters():
        found = results.get(f"grad.{name}")
        if found is not None:
            size += float(torch.linalg.vector_norm(parameter.detach().double())) ** 2
            grad += float(torch.linalg.vector_norm(found.double())) ** 2
    return _STEP * math.sqrt(size / grad) if grad > 0 and math.isfinite(grad) else 1e-3


def _compare(
    name: str, ours: Tensor | None, theirs: Tensor, oracle: Tensor | None, scale: float
) -> Verdict:
    if ours is None or oracle is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Verdict(name, math.inf, 0.0, 0.0)
    if not theirs.is_floating_point():
        if theirs.is_complex() or theirs.numel() == 0:
            return Verdict(name, 0.0 if torch.equal(ours, theirs) else math.inf, 0.0, 0.0)
        wrong, usual = ((t != oracle).double().mean().item() for t in (ours, theirs))
        return Verdict(name, wrong, usual, DEFAULT_FACTOR * usual)
    exact = oracle.double()
    norm = float(torch.linalg.vector_norm(exact))
    rounding = unit_rounding(theirs.dtype)
    error, usual = relative_error(ours, exact), relative_error(theirs, exact)
    noise = norm <= _NOISE_FLOOR * rounding * scale and (norm == 0 or usual > _NOISE_ERROR)
    if name.startswith("grad.") and noise:
        # Zero but for rounding (a bias before a softmax, say): judged against all gradients.
        errors = [
            float(torch.linalg.vector_norm(t.double() - exact)) / scale if scale else 0.0
            for t in (ours, theirs)
        ]
        return Verdict(name, errors[0], errors[1], DEFAULT_FACTOR * errors[1] + 2 * rounding)
    if math.isinf(usual):
        return judge(name, ours, theirs, exact)
    return Verdict(name, error, usual, DEFAULT_FACTOR * usual + 2 * rounding)


def _pool(name: str, each: Sequence[Verdict]) -> Verdict:
    if len(each) == 1:
        return each[0]

    def mean(values: list[float]) -> float:
        return math.sqrt(sum(v * v for v in values) / len(values))

    return Verdict(
        name,
        mean([v.error for v in each]),
        mean([v.torch_error for v in each]),
        mean([v.limit for v in each]),
    )
