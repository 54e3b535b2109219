"""What rows of drawn cases say: how far choices are from the best, and where they lose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastlinear.calibration.ways import EAGER, OURS
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.core.timing import Ratio, Samples, paired_ratio

NOISE = 0.02
"""What a ratio must pass beyond its 95% interval to count as a loss."""
_EDGES = (0.25, 0.5, 0.67, 0.8, 0.9, 0.98, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, math.inf)
SUMMARY = (
    *("family", ">cases", ">regret", ">95%", ">worst", ">slower than eager", ">than best peer"),
    *(">speed-up over eager", ">over best peer"),
)
LEGEND = (
    "regret: time of our choice over that of the best of ours, 1 within noise: geometric mean,\n"
    "95th percentile, worst. slower: cases, beyond noise and 2%. speed-ups: geometric means.\n"
)
INVARIANT = ("batch-invariant calls", ">cases", ">time over our choice's", ">95%", ">over eager's")
COLUMNS = ("case", ">regret", ">of eager", ">of best peer", "best of ours", "best peer")


@dataclass(frozen=True)
class Outcome:
    """One case.

    Attributes:
        problem: the forward's.
        regret: time of our choice over that of the best of ours; 1 where that is within noise.
        best: the best of ours.
        of_eager, of_peer: time of our choice over eager's and the best peer's.
        peer: the best peer.
        explain: why dispatch chose as it did, a line a piece.
    """

    problem: Problem
    regret: float
    best: str
    of_eager: Ratio
    of_peer: Ratio
    peer: str
    explain: tuple[str, ...]


def wrong(row: Mapping[str, Any]) -> str | None:
    """Why our own call took no part: less accurate than allowed, and so not timed."""
    why: str | None = row["failed"].get(OURS)
    return why


def outcome(row: Mapping[str, Any]) -> Outcome:
    """What a row says whose call is not ``wrong``."""
    arms = row["arms"]
    samples = {
        name: Samples(name, tuple(arm["samples_us"]), row["metric"], 1, "")
        for name, arm in arms.items()
    }
    own = samples[OURS]
    mine = [name for name, arm in arms.items() if arm["took"]]
    best = min(mine, key=lambda name: samples[name].median_us)
    over = paired_ratio(own, samples[best])
    others = (name for name in arms if name not in (*mine, BATCH_INVARIANT))
    peer = min(others, key=lambda name: samples[name].median_us)
    return Outcome(
        Problem.from_json(row["problem"]),
        max(1.0, over.median) if over.low > 1.0 else 1.0,
        best,
        paired_ratio(own, samples[EAGER]),
        paired_ratio(own, samples[peer]),
        peer,
        tuple(row["explain"]),
    )


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of cases of one kind."""
    found = [outcome(row) for row in rows]
    regrets = np.array([o.regret for o in found])
    return {
        "cases": len(found),
        "regret": _geomean(regrets),
        "regret_95": float(np.quantile(regrets, 0.95)),
        "regret_worst": float(regrets.max()),
        "slower_than_eager": sum(_slower(o.of_eager) for o in found),
        "slower_than_peer": sum(_slower(o.of_peer) for o in found),
        "over_eager": 1 / _geomean([o.of_eager.median for o in found]),
        "over_peer": 1 / _geomean([o.of_peer.median for o in found]),
    }


def account(name: str, rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """``summary`` as a line under ``SUMMARY``."""
    told = summary(rows)
    regrets = (f"{told[key]:.3f}" for key in ("regret", "regret_95", "regret_worst"))
    speed = (f"{told[key]:.2f}" for key in ("over_eager", "over_peer"))
    slower = (str(told[f"slower_than_{whom}"]) for whom in ("eager", "peer"))
    return (name, str(told["cases"]), *regrets, *slower, *speed)


def worst(rows: Sequence[Mapping[str, Any]], count: int = 20) -> list[Outcome]:
    """The cases that lose most, to the best of ours or to a peer."""
    found = [outcome(row) for row in rows]
    return sorted(found, key=lambda o: -max(o.regret, o.of_peer.low))[:count]


def lines(outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """Rows of a table under ``COLUMNS``."""
    return [
        (
            o.problem.describe(),
            f"{o.regret:.2f}",
            f"{o.of_eager.median:.2f}",
            f"{o.of_peer.median:.2f}",
            o.best,
            o.peer,
        )
        for o in outcomes
    ]


def histogram(rows: Sequence[Mapping[str, Any]], width: int = 40) -> list[tuple[str, str, str]]:
    """(up to which ratio to the best peer, how many cases, a bar)."""
    ratios = [outcome(row).of_peer.median for row in rows]
    counts, low = [], 0.0
    for high in _EDGES:
        counts.append(sum(low < r <= high for r in ratios))
        low = high
    most = max(counts)
    names = [f"≤ {edge:g}" for edge in _EDGES[:-1]] + [f"> {_EDGES[-2]:g}"]
    return [
        (name, str(count), "█" * math.ceil(width * count / most))
        for name, count in zip(names, counts, strict=True)
    ]


def invariant(name: str, rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """What calls cost whose rows do not depend on each other, as a line under ``INVARIANT``; None
    where nobody measured them."""
    each = [row["arms"] for row in rows if BATCH_INVARIANT in row["arms"]]
    if not each:
        return None

    def over(arm: str) -> list[float]:
        return [arms[BATCH_INVARIANT]["us"] / arms[arm]["us"] for arms in each]

    own, eager = over(OURS), over(EAGER)
    told = _geomean(own), float(np.quantile(own, 0.95)), _geomean(eager)
    return (name, str(len(each)), *(f"{ratio:.2f}" for ratio in told))


def _slower(ratio: Ratio) -> bool:
    return ratio.low > 1.0 + NOISE


def _geomean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.exp(np.mean(np.log(values))))
