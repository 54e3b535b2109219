"""The clock: order, pairing, intervals; a fake clock stands in for time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fastlinear.core import timing
from fastlinear.core.errors import InputError
from fastlinear.core.timing import Samples, first_call_us, interleave, paired_ratio


class FakeClock:
    """A clock that only the contenders advance."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def perf_counter(self) -> float:
        return self.now / 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(timing, "time", fake)
    return fake


def samples(name: str, us: list[float] | np.ndarray) -> Samples:
    return Samples(name, tuple(float(v) for v in us), "wall", 1, "clock")


def _order(clock: FakeClock, names: str, rounds: int) -> list[str]:
    """Names in the order of their samples, round by round."""
    calls: list[str] = []

    def contender(name: str):
        def run() -> None:
            clock.now += 1_000_000  # a millisecond: one call a sample
            calls.append(name)

        return run

    interleave({n: contender(n) for n in names}, rounds=rounds)
    timed = "".join(calls[-2 * len(names) * rounds :])
    assert timed[::2] == timed[1::2], "each runs once untimed before its sample"
    return [timed[::2][i : i + len(names)] for i in range(0, len(names) * rounds, len(names))]


def test_two_are_reversed_every_round(clock: FakeClock) -> None:
    assert _order(clock, "ab", 4) == ["ab", "ba", "ab", "ba"]


def test_more_come_in_changing_order_and_never_after_themselves(clock: FakeClock) -> None:
    found = _order(clock, "abcde", 40)
    assert all(sorted(order) == list("abcde") for order in found)
    joined = "".join(found)
    assert all(a != b for a, b in pairwise(joined))
    before = {n: {a for a, b in pairwise(joined) if b == n} for n in "abcde"}
    assert all(before[n] == set("abcde") - {n} for n in "abcde"), "each follows each of the others"
    assert found == _order(clock, "abcde", 40), "the same in every run"


def test_measured_times_are_the_clocks(clock: FakeClock) -> None:
    def slow() -> None:
        clock.now += 2_000_000

    def fast() -> None:
        clock.now += 10_000  # 10 us: 100 calls fill a sample of a millisecond

    result = interleave({"slow": slow, "fast": fast}, rounds=6)
    assert result["slow"].us == (2000.0,) * 6
    assert result["fast"].median_us == 10.0
    assert (result["slow"].inner, result["fast"].inner) == (1, 100)
    assert result["fast"].ci95_us == (10.0, 10.0)
    ratio = paired_ratio(result["slow"], result["fast"])
    assert (ratio.median, ratio.low, ratio.high) == (200.0, 200.0, 200.0)


def test_budget_stops_early_but_never_below_five_rounds(clock: FakeClock) -> None:
    def second() -> None:
        clock.now += 1_000_000_000

    assert len(interleave({"a": second}, rounds=50, budget_s=0.5)["a"].us) == 5
    assert len(interleave({"a": second}, rounds=50, budget_s=20.0)["a"].us) == 21
    assert len(interleave({"a": second}, rounds=3, budget_s=0.5)["a"].us) == 3


def test_paired_ratio_is_immune_to_drift() -> None:
    """The machine slows down threefold over the run; the pairs still say 2x."""
    rng = np.random.default_rng(1)
    drift = np.linspace(1.0, 3.0, 31)
    noise_a, noise_b = rng.normal(1, 0.01, 31), rng.normal(1, 0.01, 31)
    ratio = paired_ratio(samples("a", 20 * drift * noise_a), samples("b", 10 * drift * noise_b))
    assert 1.97 < ratio.low <= ratio.median <= ratio.high < 2.03


def test_paired_ratio_of_equals_contains_one() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(10, 1, 41), rng.normal(10, 1, 41)
    ratio = paired_ratio(samples("a", a), samples("b", b))
    assert ratio.low < 1.0 < ratio.high


def test_paired_ratio_survives_outliers() -> None:
    us = np.full(15, 10.0)
    us[[3, 9]] = 1e4
    assert paired_ratio(samples("a", us), samples("b", np.full(15, 5.0))).median == 2.0


def test_paired_ratio_refuses_unequal_runs() -> None:
    with pytest.raises(InputError, match=r"paired_ratio: expected .*; received 2 and 3 rounds"):
        paired_ratio(samples("a", [1.0, 2.0]), samples("b", [1.0, 2.0, 3.0]))


def test_interleave_refuses_an_unknown_metric() -> None:
    with pytest.raises(InputError, match="metric in wall, device; received 'cycles'"):
        interleave({"a": lambda: None}, metric="cycles")


def test_first_call_counts_exactly_one_call(clock: FakeClock) -> None:
    calls = []

    def run() -> None:
        calls.append(1)
        clock.now += 7_000

    assert first_call_us(run) == 7.0
    assert len(calls) == 1


def test_errors_of_a_contender_reach_the_caller() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave({"a": broken})


def test_cpu_has_no_peak_memory() -> None:
    assert timing.peak_memory_bytes(lambda: None, "cpu") is None


@pytest.mark.gpu
def test_cuda_device_time_is_a_graph_replay() -> None:
    import torch

    x = torch.randn(256, 256, device="cuda")
    result = interleave(
        {"mm": lambda: x @ x, "sync": lambda: (x @ x).sum().item()},
        device="cuda",
        metric="device",
        rounds=5,
    )
    assert result["mm"].how == "graph"
    assert result["sync"].how == "events"  # a host synchronisation cannot be captured
    assert timing.peak_memory_bytes(lambda: x @ x, "cuda") >= 256 * 256 * 4


@pytest.mark.gpu
def test_device_time_does_not_depend_on_the_host() -> None:
    """A slow host records as many calls as a quick one: few would show the graph's own launch."""
    import time

    import torch

    x = torch.randn(64, 64, device="cuda")

    def hesitant() -> None:
        time.sleep(1e-3)
        torch.relu(x)

    arms = {"quick": lambda: torch.relu(x), "hesitant": hesitant}
    result = interleave(arms, device="cuda", metric="device", rounds=9)
    assert result["hesitant"].inner > 50
    assert result["hesitant"].median_us == pytest.approx(result["quick"].median_us, rel=0.15)
