"""Rows of a benchmark as tables of the terminal: one a problem, direction and metric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.rows import best_peer, ratio

Row = dict[str, Any]
BASELINE = "eager"
COLUMNS = ("contender", ">measured", ">of eager", ">of best peer", "best peer", ">of roofline")
LEGEND = (
    "of eager, of best peer: time over theirs, below 1 is faster. The best peer is the fastest\n"
    "that is not fastlinear and computes on the contender's terms."
)


def tables(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """(title, lines under ``COLUMNS``) of each problem, direction and metric that was measured."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["problem"], row["direction"], row["metric"]), []).append(row)
    found = []
    for (problem, direction, metric), members in groups.items():
        lines = [_line(row, members) for row in members if not row["skipped"]]
        if lines:
            found.append((f"{problem}: {direction}, {metric.replace('_', ' ')}", lines))
    return found


def left_out(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """(contender, why, in how many measurements) of what was not measured."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["skipped"]:
            key = row["contender"], row["skipped"]
            counts[key] = counts.get(key, 0) + 1
    return [(contender, why, str(count)) for (contender, why), count in counts.items()]


def _line(row: Row, members: Sequence[Row]) -> tuple[str, ...]:
    eager = next((r for r in members if r["contender"] == BASELINE), None)
    best = best_peer(row, members)
    place = row["roofline"]
    return (
        row["contender"],
        _measured(row),
        _number(ratio(row, eager)),
        _number(ratio(row, best)),
        "-" if best is None else best["contender"],
        "-" if place is None else f"{100 * place['fraction']:.0f}%",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _measured(row: Row) -> str:
    if not row["valid"]:
        return "wrong: less accurate than allowed"
    if row["peak_bytes"] is not None:
        return f"{row['peak_bytes']} bytes"
    if row["metric"] == "kernels":
        count = len(row["kernels"])
        return f"{count} kernel" if count == 1 else f"{count} kernels"
    return f"{row['median_us']:.1f} us"
