"""Tuning: verify every able backend against the oracle, then time the survivors interleaved.

The winner is written to the user's cache, with what leaves it in doubt: where the choice without it
may be faster within noise, selection keeps to that. A backend beats ``eager``
only beyond the noise of the paired measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastlinear.core.compare import DRAWS, Verdict, judge, over_draws
from fastlinear.core.device import device_facts
from fastlinear.core.errors import NotYetError
from fastlinear.core.interrupts import restored
from fastlinear.core.problem import Problem
from fastlinear.core.timing import Ratio, Samples, interleave, paired_ratio
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import Backend, family
from fastlinear.dispatch.confidence import doubt_of, rivals_of
from fastlinear.dispatch.steps import STEP

BASELINE = "eager"
_MAX_INPUT_SETS = 64
_BEYOND_CPU_CACHES = 1 << 27  # bytes


@dataclass(frozen=True)
class Tuned:
    """What tuning one Problem found.

    Attributes:
        problem: the Problem, with its batch dims as measured.
        best: the winner.
        samples: backend → timings, for all that passed verification.
        speedups: backend → paired speed-up over eager.
        rejected: backend → why it was not timed.
        stored: whether the decision reached the disk. One in doubt leaves an earlier one there that
            is not.
        doubt: why the measurement leaves the decision open, in words; ``""`` where it does not.
        rivals: the backends that may be faster than the winner within noise.
    """

    problem: Problem
    best: str
    samples: dict[str, Samples]
    speedups: dict[str, Ratio]
    rejected: dict[str, str]
    stored: bool
    doubt: str = ""
    rivals: tuple[str, ...] = ()


@restored
def tune(
    problem: Problem,
    *,
    device: torch.device | str | None = None,
    metric: str | None = None,
    rounds: int = 15,
    budget_s: float = 2.0,
    seed: int = 0,
    draws: int = DRAWS,
    save: bool = True,
) -> Tuned:
    """Verify and time every backend of ``problem.piece`` and remember the fastest.

    Args:
        problem: what to tune. Its bucket is what the cache remembers.
        device: where to run; the Problem's device type by default.
        metric: ``"wall"`` (throughput of back-to-back calls, what the host does for each
            included) or ``"device"`` (graph replay). By default what counts for the Problem; see
            ``metric_of``.
        rounds, budget_s: limits of the interleaved measurement.
        seed: seed of the random inputs.
        draws: of inputs, at most, that judge a backend which is less accurate than allowed on the
            first.
        save: write the decision to the user's cache.
    """
    fam = family(problem.family)
    where = torch.device(device if device is not None else problem.device)
    metric = metric or metric_of(problem)
    able: list[Backend] = []
    rejected: dict[str, str] = {}
    for backend in fam.candidates(problem.piece):
        why = backend.reason_not(problem)
        if why is None:
            able.append(backend)
        else:
            rejected[backend.name] = why
    with torch.no_grad():
        sets = [fam.make_inputs(problem, where, seed)]
        more = range(1, input_sets(problem, sets[0]))
        sets += [fam.make_inputs(problem, where, seed + i) for i in more]
        faults = _faults(able, problem, where, seed, sets[0], draws)
        rejected |= faults
        survivors = [backend for backend in able if backend.name not in faults]
        arms = {b.name: rotating(timed(b, problem), sets) for b in survivors}
        samples = interleave(arms, device=where, metric=metric, rounds=rounds, budget_s=budget_s)
    best, speedups = winner(samples)
    doubt = doubt_of(best, samples)
    rivals = rivals_of(best, samples) if doubt else ()
    stored = False
    if save:
        times = {name: s.median_us for name, s in samples.items()}
        stored = cache.store(problem, survivors, best, times, doubt, rivals)
    return Tuned(problem, best, samples, speedups, rejected, stored, doubt, rivals)


@dataclass(frozen=True)
class Expected:
    """What a backend's results are judged by: PyTorch's in the same dtype, and the oracle's."""

    theirs: tuple[torch.Tensor | None, ...]
    oracle: tuple[torch.Tensor | None, ...]


def expected_of(problem: Problem, inputs: tuple[Any, ...]) -> Expected:
    """Computed once for all backends of a Problem: on a CPU the float64 oracle is the dearest
    part of tuning."""
    reference = family(problem.family).reference
    oracle = reference(problem, tuple(to_float64(i) for i in inputs))
    return Expected(_flat(reference(problem, inputs)), _flat(oracle))


def _faults(
    able: Sequence[Backend],
    problem: Problem,
    where: torch.device,
    seed: int,
    inputs: tuple[Any, ...],
    draws: int,
) -> dict[str, str]:
    """Why backends that claim to serve the Problem cannot take part, by name.

    What is less accurate than allowed on one draw of inputs is judged over more of them.
    """
    faults: dict[str, str] = {}
    first: dict[str, list[Verdict]] = {}
    expected = expected_of(problem, inputs)

    def judged(backend: Backend, inputs: tuple[Any, ...], expected: Expected) -> Any:
        try:
            return verify(backend, problem, inputs, expected)
        except NotYetError:
            raise  # it will serve: without it, no decision is to stand
        except Exception as error:
            if backend.name == BASELINE:
                raise
            faults[backend.name] = f"raised {type(error).__name__}: {str(error).strip()[:300]}"
            return None

    for backend in able:
        if (verdicts := judged(backend, inputs, expected)) is not None:
            first[backend.name] = verdicts
    by_name = {backend.name: backend for backend in able}

    def again(draw: int, names: Sequence[str]) -> Mapping[str, Sequence[Verdict]]:
        other = family(problem.family).make_inputs(problem, where, seed + draw)
        expected = expected_of(problem, other)
        return {
            name: verdicts
            for name in names
            if (verdicts := judged(by_name[name], other, expected)) is not None
        }

    for name, verdicts in over_draws(first, again, draws).items():
        if name in faults:
            continue
        if failed := [v for v in verdicts if not v.passed]:
            faults[name] = f"less accurate than allowed: {failed[0]}"
    return faults


def verify(
    backend: Backend,
    problem: Problem,
    inputs: tuple[Any, ...],
    expected: Expected | None = None,
) -> list[Verdict]:
    """Judge one backend on one set of inputs, every output against the float64 oracle.

    ``expected`` is ``expected_of(problem, inputs)``, given when it is known already.
    """
    expected = expected or expected_of(problem, inputs)
    ours = _flat(backend.load(problem)(*inputs))
    verdicts = []
    for i, (a, t, o) in enumerate(zip(ours, expected.theirs, expected.oracle, strict=True)):
        if o is None:
            continue
        if a is None or t is None:
            name = f"{backend.name}[{i}]"
            verdicts.append(Verdict(name, float("inf"), 0.0, 0.0))
            continue
        verdicts.append(judge(f"{backend.name}[{i}]", a, t, o))
    return verdicts


def winner(samples: dict[str, Samples]) -> tuple[str, dict[str, Ratio]]:
    """The fastest contender that beats the baseline beyond noise, else the baseline."""
    baseline = samples.get(BASELINE)
    if baseline is None:
        return min(samples, key=lambda n: samples[n].median_us), {}
    speedups = {n: paired_ratio(baseline, s) for n, s in samples.items() if n != BASELINE}
    ahead = [n for n, ratio in speedups.items() if ratio.low > 1.0]
    if not ahead:
        return BASELINE, speedups
    return min(ahead, key=lambda n: samples[n].median_us), speedups


def metric_of(problem: Problem) -> str:
    """What counts for a Problem: the device inside a CUDA graph, and for pieces of a training step
    on a GPU, which a tape launches: the Python of a backend's function is not run again. PyTorch's
    own ops, which no tape launches, are told too short there by what they cost the host.
    """
    of_step = STEP in family(problem.family).pieces and problem.piece != STEP
    inside = problem.device == "cuda" and problem.needs_grad and of_step
    return "device" if problem.captured or inside else "wall"


def timed(backend: Backend, problem: Problem) -> Callable[..., Any]:
    """What stands for a backend on the clock: the way of the op's callers to it, where its family
    names one, else its function."""
    way = family(problem.family).timed
    run = None if way is None else way(backend, problem)
    return backend.load(problem) if run is None else run


def rotating(run: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Callable[[], Any]:
    """A callable without arguments that takes the next input set at each call."""
    state = [0]
    count = len(sets)

    def call() -> Any:
        state[0] = (state[0] + 1) % count
        return run(*sets[state[0]])

    return call


def input_sets(problem: Problem, inputs: tuple[Any, ...]) -> int:
    """How many input sets to rotate over, given one.

    On a GPU those of a cold family exceed the L2 cache twice, and others are one. A CPU is measured
    warm with two sets, or with one that its caches do not hold anyway.
    """
    if problem.device != "cuda":
        traffic = family(problem.family).cost(problem).bytes
        return 2 if traffic < _BEYOND_CPU_CACHES else 1
    if not family(problem.family).cold:
        return 1
    held = sum(t.numel() * t.element_size() for t in _flat(inputs) if isinstance(t, torch.Tensor))
    wanted = math.ceil(2 * device_facts("cuda").l2_bytes / max(held, 1))
    return max(1, min(_MAX_INPUT_SETS, wanted))


def to_float64(item: Any) -> Any:
    """A tensor, or tuples of them, in float64; anything else as it is."""
    if isinstance(item, torch.Tensor) and item.is_floating_point():
        return item.to(torch.float64)
    return tuple(map(to_float64, item)) if isinstance(item, tuple) else item


def _flat(result: Any) -> tuple[torch.Tensor | None, ...]:
    """Results may hold one tuple a layer."""
    if not isinstance(result, tuple):
        return (result,)
    return tuple(t for item in result for t in _flat(item))
