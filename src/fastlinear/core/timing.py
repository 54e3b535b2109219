"""The only clock of the project.

Contenders are timed interleaved, round after round in changing order, so that drift of the machine
and what the one before leaves in the caches hit all of them alike; results are compared pair by
pair, with a bootstrap interval.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fastlinear.core.errors import InputError
from fastlinear.core.graphs import CudaRecorder, Pool
from fastlinear.core.interrupts import restored

METRICS = ("wall", "device")
_TARGET_SAMPLE_US = 1000.0
_TARGET_REPLAY_US = 500.0
_MIN_INNER_CUDA = 4
_SHORT_US = 2_000.0  # a longer call hides its own launch
_LONG_US = 20_000.0
_MAX_INNER = 1000


@dataclass(frozen=True)
class Samples:
    """Raw timings of one contender, one number a round.

    Attributes:
        name: the contender.
        us: microseconds per call, one entry a round, in order.
        metric: ``"wall"`` (host latency until the result is there) or ``"device"`` (time on the
            device's own clock).
        inner: how many calls one sample averages over.
        how: ``"clock"``, ``"events"`` or ``"graph"``: what measured it.
    """

    name: str
    us: tuple[float, ...]
    metric: str
    inner: int
    how: str

    @property
    def median_us(self) -> float:
        """Median microseconds per call."""
        return float(np.median(self.us))

    @property
    def ci95_us(self) -> tuple[float, float]:
        """Bootstrap 95% interval of the median, in microseconds."""
        return _bootstrap_median(np.asarray(self.us))


@dataclass(frozen=True)
class Ratio:
    """Paired ratio of two contenders' times with its bootstrap 95% interval."""

    median: float
    low: float
    high: float

    @property
    def within_noise(self) -> bool:
        """Whether the interval leaves open which of the two is faster."""
        return self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(numerator: Samples, denominator: Samples) -> Ratio:
    """Median over rounds of ``numerator / denominator``, with a bootstrap 95% interval.

    Both must come from the same ``interleave`` call. As a speed-up of B over A pass (A, B).
    """
    if len(numerator.us) != len(denominator.us):
        raise InputError(
            "paired_ratio",
            "samples of the same interleaved run",
            f"{len(numerator.us)} and {len(denominator.us)} rounds",
            "Time both in one call of interleave.",
        )
    ratios = np.asarray(numerator.us) / np.asarray(denominator.us)
    low, high = _bootstrap_median(ratios)
    return Ratio(float(np.median(ratios)), low, high)


@restored
def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    metric: str = "wall",
    rounds: int = 15,
    budget_s: float | None = None,
) -> dict[str, Samples]:
    """Time all contenders in turn, in another order every round.

    Two are reversed every round (A B, B A). More of them come in a new random order, the same in
    every run, in which none follows itself.

    Before each sample a contender of less than 20 ms runs as often untimed, so that none is
    favoured by whom it follows: the host's threads and the caches are then its own.

    Args:
        contenders: name → a callable without arguments that does one unit of work. To defeat warm
            caches the callable itself should rotate over several input sets.
        device: where the work runs.
        metric: ``"wall"`` or ``"device"``. Device time of a CUDA contender is the replay time of a
            CUDA graph of its calls, or of events around the calls where it cannot be captured. On
            a CPU the two metrics are the same clock.
        rounds: samples per contender.
        budget_s: stop early (never below 5 rounds) once this many seconds have passed.

    Returns:
        name → Samples, all with the same number of rounds.
    """
    if metric not in METRICS:
        raise InputError(
            "interleave",
            f"metric in {', '.join(METRICS)}",
            repr(metric),
            "'wall' is what a caller waits, 'device' what the device works.",
        )
    device = torch.device(device)
    runners = {n: _prepare(fn, device, metric) for n, fn in contenders.items()}
    samples: dict[str, list[float]] = {n: [] for n in runners}
    orders = _orders(list(runners))
    start = time.perf_counter()
    for i in range(rounds):
        for name in next(orders):
            samples[name].append(runners[name].sample_us())
        if budget_s is not None and i >= 4 and time.perf_counter() - start > budget_s:
            break
    return {
        n: Samples(n, tuple(samples[n]), metric, runners[n].inner, runners[n].how) for n in runners
    }


def _orders(names: list[str]) -> Iterator[list[str]]:
    """An order of the contenders for each round, without end."""
    order = list(names)
    yield order
    shuffle = random.Random(len(names)).shuffle
    while True:
        last = order[-1]
        if len(names) < 3:
            order = order[::-1]
        else:
            order = list(names)
            shuffle(order)
            if order[0] == last:
                order.append(order.pop(0))
        yield order


def first_call_us(fn: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """Wall microseconds of the very next call, compilation included."""
    return _wall_once(fn, 1, torch.device(device))


def peak_memory_bytes(fn: Callable[[], object], device: torch.device | str) -> int | None:
    """Peak bytes allocated on a CUDA device during one call, above what was held before.

    Returns None on a CPU, where torch keeps no such count.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - int(held)


@dataclass
class _Runner:
    warm: Callable[[], None]
    run: Callable[[], None]
    inner: int
    how: str
    device: torch.device

    def sample_us(self) -> float:
        if self.how == "clock":
            self.warm()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            begin = time.perf_counter_ns()
            self.run()
            return (time.perf_counter_ns() - begin) / 1e3 / self.inner
        torch.cuda.synchronize(self.device)
        self.warm()  # keeps the device busy until what is timed lies in its queue
        return _events_us(self.run) / self.inner


def _prepare(fn: Callable[[], object], device: torch.device, metric: str) -> _Runner:
    fn()
    once = _wall_once(fn, 1, device)
    if once < _LONG_US:
        once = min(_wall_once(fn, 1, device) for _ in range(4))
    inner = int(max(1, min(_MAX_INNER, _TARGET_SAMPLE_US / max(once, 1e-3))))
    if device.type == "cuda" and once < _SHORT_US:  # back to back: the host runs ahead, as in use
        inner = max(inner, _MIN_INNER_CUDA)

    calls = _times(fn, inner)

    def calls_until_done() -> None:
        calls()
        torch.cuda.synchronize(device)

    warm = calls if once < _LONG_US else _nothing  # a long call warms its own caches
    if device.type != "cuda":
        return _Runner(warm, calls, inner, "clock", device)
    if metric == "wall":
        return _Runner(warm, calls_until_done, inner, "clock", device)
    found = _graph_of(fn, inner, device)
    if found is None:
        return _Runner(warm, calls, inner, "events", device)
    graph, inner = found
    return _Runner(
        _nothing if warm is _nothing else graph.replay, graph.replay, inner, "graph", device
    )


def _graph_of(
    fn: Callable[[], object], inner: int, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, int] | None:
    """A graph of as many calls as fill a sample by the device's time, and their number.

    Few of them would measure the graph's launch, and ``inner`` is few where the host is slow. None
    where they cannot be captured.
    """
    graph = recorded(_times(fn, inner), device)
    if graph is None:
        return None
    once = min(_events_us(graph.replay) for _ in range(2)) / inner
    enough = int(min(_MAX_INNER, _TARGET_REPLAY_US / max(once, 1e-3)))
    if enough <= 2 * inner or (more := recorded(_times(fn, enough), device)) is None:
        return graph, inner
    return more, enough


def _times(fn: Callable[[], object], count: int) -> Callable[[], None]:
    """So many calls, of which no result is kept."""

    def calls() -> None:
        for _ in range(count):
            fn()

    return calls


def _events_us(run: Callable[[], object]) -> float:
    """Microseconds on the device from before ``run`` to after it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _nothing() -> None:
    pass


def recorded(calls: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph | None:
    """A CUDA graph of the calls, replayed once, or None where they cannot be captured (a sync
    inside, say). They run once before, outside it."""
    recorder = CudaRecorder()
    recorder.warm(calls, device, 1)
    try:
        graph = recorder.record(calls, device, Pool()).graph
    except (RuntimeError, AssertionError):  # what torch raises when capture is not permitted
        recorder.settle(device)
        return None
    graph.replay()
    recorder.settle(device)
    return graph


def _wall_once(fn: Callable[[], object], inner: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter_ns()
    for _ in range(inner):
        fn()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - begin) / 1e3 / inner


def _bootstrap_median(values: np.ndarray, resamples: int = 1000) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(values), size=(resamples, len(values)))
    medians = np.median(values[draws], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)
