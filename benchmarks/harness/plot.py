"""One honest picture of a run: every contender of every case against eager, losses included."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.experiments.groups import plot as groups_plot
from benchmarks.experiments.overhead.heat import heatmap
from benchmarks.experiments.pseudo_linear import plot as pseudo_plot
from benchmarks.experiments.pseudo_linear import table as pseudo_table
from benchmarks.harness.case import TIMED
from benchmarks.harness.figure import legend, written
from benchmarks.harness.rows import Row
from fastlinear.core.errors import InputError

BASELINE = "eager"
_FORMATS = (".png", ".svg")
_PEER_COLORS = ("#8c8c8c", "#4c72b0", "#55a868", "#8172b3", "#ccb974", "#64b5cd", "#937860")
_OUR_COLORS = ("#c44e52", "#dd8452", "#e377c2", "#d62728")


def plot(rows: Iterable[Row], path: str | Path) -> Path:
    """Draw the speed of every timed contender relative to eager (right of 1 is faster).

    Rows of experiment ``overhead`` become a heat map (``bench.heatmap``), those of
    ``pseudo-linear`` curves over the width, those of ``groups`` that differ in one size curves of
    time over it with the floor drawn in. Otherwise one panel for each (direction, metric), one
    line a problem, one mark a contender; ours are diamonds. A logarithmic axis, so that 2x faster
    and 2x slower are equally far from 1.

    Args:
        rows: what ``bench.run`` returned or ``read_rows`` read.
        path: a ``.png`` or ``.svg`` file; folders are made.

    Raises:
        InputError: another file ending, or no timed row.
        UnsupportedError: matplotlib is missing; it comes with the extra ``[plots]``.
    """
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise InputError(
            "bench.plot",
            f"a file ending in {' or '.join(_FORMATS)}",
            path.name,
            "The ending chooses the format.",
        )
    rows = list(rows)
    if any(row["experiment"] == "overhead" for row in rows):
        return heatmap(rows, path)
    if any(row["experiment"] == pseudo_table.EXPERIMENT for row in rows):
        return pseudo_plot.plot(rows, path)
    if groups_plot.curves(rows):
        return groups_plot.plot(rows, path)
    panels = speeds(rows)
    if not panels:
        raise InputError(
            "bench.plot",
            "rows with timings of eager",
            "no such row",
            "Let eager take part: speeds are drawn against it.",
        )
    lines = sum(len(problems) for problems in panels.values())
    size = 10, 1.5 + 0.28 * lines + 0.7 * len(panels)
    with written(path, size) as figure:
        heights = [len(problems) + 1 for problems in panels.values()]
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights, sharex=True)
        looks = _looks(panels)
        for ax, (title, problems) in zip(axes[:, 0], panels.items(), strict=True):
            _panel(ax, title, problems, looks)
        axes[-1, 0].set_xlabel("speed relative to eager (more is faster)")
        legend(figure, axes[:, 0], columns=5)
    return path


def speeds(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """``"direction, metric"`` → problem → contender → time of eager over its time.

    Only timed rows count; a problem without a timing of eager is left out. Rows of experiment
    ``linear-bias`` are held against ``linear``, which is eager there.
    """
    grouped: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["metric"] in TIMED and row["median_us"] is not None:
            panel = grouped.setdefault(f"{row['direction']}, {row['metric']} time", {})
            panel.setdefault(row["problem"], {})[row["contender"]] = row["median_us"]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for title, problems in grouped.items():
        kept = {
            problem: {name: times[base] / us for name, us in times.items()}
            for problem, times in problems.items()
            for base in [BASELINE if BASELINE in times else "linear"]
            if base in times
        }
        if kept:
            found[title] = kept
    return found


def _looks(panels: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """A colour and a mark a contender, the same in every panel."""
    names = sorted({n for problems in panels.values() for t in problems.values() for n in t})
    ours = [n for n in names if n.startswith("fastlinear")]
    first = [BASELINE] if BASELINE in names else []
    theirs = [*first, *(n for n in names if n not in ours and n != BASELINE)]
    looks: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(theirs):
        looks[name] = {"color": _PEER_COLORS[i % len(_PEER_COLORS)], "marker": "o", "s": 22}
    for i, name in enumerate(ours):
        size = 60 if name == "fastlinear" else 30
        looks[name] = {"color": _OUR_COLORS[i % len(_OUR_COLORS)], "marker": "D", "s": size}
    return looks


def _panel(
    ax: Any, title: str, problems: dict[str, dict[str, float]], looks: dict[str, dict[str, Any]]
) -> None:
    heights = range(len(problems))
    for name, look in looks.items():
        marks = [(t[name], y) for y, t in zip(heights, problems.values(), strict=True) if name in t]
        if marks:
            xs, ys = zip(*marks, strict=True)
            ax.scatter(xs, ys, label=name, alpha=0.9, zorder=3, linewidths=0, **look)
    ax.axvline(1.0, color="black", linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}x")
    ax.set_yticks(list(heights), list(problems))
    ax.set_ylim(len(problems) - 0.5, -0.5)
    ax.grid(axis="x", linewidth=0.3)
    ax.set_title(title, loc="left")
