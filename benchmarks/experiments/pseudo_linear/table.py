"""The pseudo-Linear document's tables from rows: speed-up over a full layer by width."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.case import TIMED
from benchmarks.harness.peer import OURS
from benchmarks.harness.rows import Row
from fastlinear.core import text_table
from fastlinear.core.text_table import PIPE_WIDTH

EXPERIMENT, _LINEAR = "pseudo-linear", "linear"
TOLERANCE = 0.25


@dataclass(frozen=True)
class Curve:
    """One table: the widths of one dtype, batch, activation, direction and metric.

    Attributes:
        dtype, m, activation, direction, metric: what it is of; metric is ``"wall"`` or
            ``"device"``.
        speedups: width → contender → time of Linear over its time, the median of the rounds in
            which both took their turn.
        rounds: width → that of fastlinear in each round.
        expected: width → what the model says of fastlinear.
        shares: width → of what Linear, then fastlinear took, what the model says.
        bounds: width → what Linear, then the diagonal layer waits for in the model.
    """

    dtype: str
    m: int
    activation: str
    direction: str
    metric: str
    speedups: dict[int, dict[str, float]]
    rounds: dict[int, list[float]]
    expected: dict[int, float]
    shares: dict[int, tuple[float, float]]
    bounds: dict[int, tuple[str, str]]

    @property
    def title(self) -> str:
        """The same in words."""
        act = "" if self.activation == "none" else f" + {self.activation}"
        return f"{self.dtype}, batch {self.m}, {self.direction}{act}, {self.metric} time"


def curves(rows: Iterable[Row]) -> list[Curve]:
    """The tables of layers in the rows, in their order; widths without a timing of Linear are left
    out, and scaled branches, which the same sizes may have."""
    found: dict[tuple[Any, ...], dict[int, dict[str, Row]]] = {}
    for row in rows:
        if row["experiment"] != EXPERIMENT or row["metric"] not in TIMED or not row["median_us"]:
            continue
        case = row["case"]
        if case["options"].get("residual") == "yes":  # a branch, which no full layer is beside
            continue
        kind = (case["dtype"], case["dims"]["M"], case["options"]["activation"])
        key = (*kind, row["direction"], row["metric"])
        found.setdefault(key, {}).setdefault(case["dims"]["K"], {})[row["contender"]] = row
    return [_curve(key, by_width) for key, by_width in found.items()]


def _curve(key: tuple[Any, ...], by_width: dict[int, dict[str, Row]]) -> Curve:
    dtype, m, activation, direction, metric = key
    found = Curve(dtype, m, activation, direction, metric, {}, {}, {}, {}, {})
    for width, times in sorted(by_width.items()):
        # a recorded full layer has its own column, as every contender has
        if _LINEAR not in times:
            continue
        base = times[_LINEAR]
        rounds = {name: _rounds(base, row) for name, row in times.items()}
        found.speedups[width] = {name: median(ratios) for name, ratios in rounds.items()}
        found.rounds[width] = rounds.get(OURS, [])
        word = f"expected {metric} us"
        both = [times[name] for name in (_LINEAR, OURS) if name in times]
        told = [row["chosen"] for row in both if word in (row["chosen"] or {})]
        if len(told) == 2:
            first, second = (float(chosen[word]) for chosen in told)
            found.expected[width] = first / second
            found.shares[width] = first / both[0]["median_us"], second / both[1]["median_us"]
            found.bounds[width] = told[0]["expected bound"], told[1]["expected bound"]
    return found


def _rounds(base: Row, row: Row) -> list[float]:
    """How many times faster than ``base`` in each round; of rows that tell no rounds, or were not
    timed together, by their medians."""
    first, second = base["samples_us"], row["samples_us"]
    if first and len(first) == len(second):
        return [a / b for a, b in zip(first, second, strict=True)]
    return [base["median_us"] / row["median_us"]]


def table(rows: Iterable[Row], width: int = PIPE_WIDTH) -> str:
    """The tables as text of ``width`` columns: by width of the layer the speed-up of each contender
    over Linear, and the model's; then how often the model is right, and where not."""
    rows = list(rows)
    parts: list[Any] = []
    for curve in curves(rows):
        names = [n for n in _names(curve) if n != _LINEAR]
        grid = []
        for k, speedups in curve.speedups.items():
            cells = [f"{speedups[n]:.2f}" if n in speedups else "-" for n in names]
            guess = f"{curve.expected[k]:.2f}" if k in curve.expected else "-"
            grid.append((k, *cells, guess, " / ".join(curve.bounds.get(k, ("-",)))))
        columns = (">width", *(f">{n}" for n in names), ">expected", "waits for (Linear / ours)")
        title = f"Speed-up over nn.Linear: {curve.title}"
        parts += [title, text_table.table(columns, grid, width=width), ""]
    near, total, misses = agreement(rows)
    if total:
        parts += [f"Expected within {100 * TOLERANCE:.0f}% of measured: {_share(near, total)}"]
        parts += [f"  {miss}" for miss in misses]
        parts += [f"One half of the rounds within that of the other: {_share(*repeated(rows))}"]
    return text_table.as_text(parts, width)


def _share(near: int, total: int) -> str:
    return f"{near} of {total} ({100 * near / max(1, total):.0f}%)"


def _names(curve: Curve) -> list[str]:
    return list(dict.fromkeys(name for s in curve.speedups.values() for name in s))


def agreement(rows: Iterable[Row]) -> tuple[int, int, list[str]]:
    """How many expected speed-ups lie within 25% of the measured ones, of how many, and which do
    not."""
    near, total, misses = 0, 0, []
    for curve in curves(rows):
        for width, guess in curve.expected.items():
            found = curve.speedups[width].get(OURS)
            if found is None:
                continue
            total += 1
            if abs(guess / found - 1.0) <= TOLERANCE:
                near += 1
            else:
                told, (first, second) = curve.rounds[width], curve.shares[width]
                misses.append(
                    f"{curve.title}, width {width}: {found:.2f} measured "
                    f"({min(told):.2f} to {max(told):.2f}), {guess:.2f} expected "
                    f"({' / '.join(curve.bounds[width])}); Linear expected to take {first:.2f} of "
                    f"what it did, ours {second:.2f}"
                )
    return near, total, misses


def repeated(rows: Iterable[Row]) -> tuple[int, int]:
    """How many of the measured speed-ups that the model is held against agree with themselves: the
    first half of the rounds within 25% of the second; and of how many. No model does better."""
    near, total = 0, 0
    for curve in curves(rows):
        for width in curve.expected:
            told = curve.rounds[width]
            if len(told) < 4:
                continue
            half = len(told) // 2
            total += 1
            near += abs(median(told[:half]) / median(told[half:]) - 1.0) <= TOLERANCE
    return near, total
