"""Curves of experiment ``groups``: time over the size of a group, the number of groups and the
tokens, with the floor drawn in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.case import TIMED
from benchmarks.harness.figure import curves_in_panels
from benchmarks.harness.peer import OURS
from benchmarks.harness.rows import Row
from fastlinear.core.errors import InputError

EXPERIMENT = "groups"
_COLORS = ("#8c8c8c", "#4c72b0", "#55a868", "#8172b3", "#a89a2c", "#2bb3cf", "#7a5b43")
_OURS = {
    OURS: "#d62728",
    f"{OURS}_groups": "#ff7f0e",
    f"{OURS}_channels": "#e377c2",
    f"{OURS}_sequences": "#9b2d6f",
}
_MOST_SPREAD = 4
_APART = 0.085  # of an axis: less, and the words below two points would touch

Dims = dict[str, int]


@dataclass(frozen=True)
class Curve:
    """What one panel shows.

    Attributes:
        title: what holds for all of it.
        axis: what its points differ in.
        kind: dtype, activation, direction and metric.
        times: point → contender → microseconds; forced backends are left out.
        floors: point → the least time the measured ceilings allow, in microseconds.
        memory: whether bytes set the floor at every point.
        groups: point → number of groups, where that differs from point to point as well.
    """

    title: str
    axis: str
    kind: tuple[str, ...]
    times: dict[int, dict[str, float]]
    floors: dict[int, float]
    memory: bool
    groups: dict[int, int]


def _square(d: Dims) -> bool:
    return d["K"] == d["N"]


# Axis: its words, the dimension that differs, what else must agree, and which cases take part.
# Over the size of a group the number of groups differs too: many are small, few are large.
_AXES: tuple[tuple[str, str, tuple[str, ...], Callable[[Dims], bool]], ...] = (
    ("features of a group (K = N)", "K", ("M",), _square),
    ("number of groups", "G", ("M", "K", "N"), lambda _: True),
    ("tokens", "M", ("G", "K", "N"), lambda _: True),
)


def curves(rows: Iterable[Row]) -> list[Curve]:
    """The curves in the rows: of two points or more, each measured with its floor.

    Where cases differ in the number of groups only, the curve over the size of a group takes the
    one with most of them.
    """
    timed = [
        row
        for row in rows
        if row["experiment"] == EXPERIMENT and row["metric"] in TIMED and row["median_us"]
    ]
    found = []
    for axis, varied, fixed, fits in _AXES:
        panels: dict[Any, dict[int, list[Row]]] = {}
        for row in timed:
            dims = row["case"]["dims"]
            if fits(dims):
                held = tuple((name, dims[name]) for name in fixed)
                key = (*_kind(row), held)
                panels.setdefault(key, {}).setdefault(dims[varied], []).append(row)
        found += [_curve(axis, key, points) for key, points in panels.items() if len(points) > 1]
    return found


def _kind(row: Row) -> tuple[str, ...]:
    case = row["case"]
    return case["dtype"], case["options"]["activation"], row["direction"], row["metric"]


def _curve(axis: str, key: Any, points: dict[int, list[Row]]) -> Curve:
    *kind, held = key
    dtype, activation, direction, metric = kind
    times: dict[int, dict[str, float]] = {}
    floors: dict[int, float] = {}
    groups: dict[int, int] = {}
    memory = True
    for at, rows in sorted(points.items()):
        most = max(row["case"]["dims"]["G"] for row in rows)
        rows = [row for row in rows if row["case"]["dims"]["G"] == most]
        times[at] = {r["contender"]: r["median_us"] for r in rows if "[" not in r["contender"]}
        groups[at] = most
        for row in rows:
            if row["roofline"] is not None:
                floors[at] = row["roofline"]["floor_us"]
                memory &= row["roofline"]["bound"] == "memory"
    sizes = ", ".join(f"{name}={size}" for name, size in held)
    act = "" if activation == "none" else f" + {activation}"
    title = f"{dtype}{act}, {sizes}, {direction}, {metric} time"
    several = len(set(groups.values())) > 1 and axis != _AXES[1][0]
    return Curve(title, axis, tuple(kind), times, floors, memory, groups if several else {})


def drawn(found: Iterable[Curve]) -> list[Curve]:
    """Those of a picture: of each axis, dtype, activation and direction the one of most points, on
    the device where that was measured; a direction beside the other.

    Sizes of groups are compared at about the same numbers of x, where any curve has that.
    """
    best: dict[Any, Curve] = {}
    every = list(found)
    for curve in [c for c in every if _spread(c) <= _MOST_SPREAD] or every:
        *kind, metric = curve.kind
        key = curve.axis, *kind
        rank = metric == "device", len(curve.times)
        if key not in best or rank > (best[key].kind[-1] == "device", len(best[key].times)):
            best[key] = curve
    names = [axis for axis, *_ in _AXES]
    return sorted(best.values(), key=lambda curve: (names.index(curve.axis), curve.kind))


def _spread(curve: Curve) -> float:
    """By how much the numbers of x, of all groups, differ over the size of a group."""
    if curve.axis != _AXES[0][0]:
        return 1.0
    numbers = [at * curve.groups.get(at, 1) for at in curve.times]
    return max(numbers) / min(numbers)


def plot(rows: Iterable[Row], path: Path) -> Path:
    """Draw the curves that ``drawn`` picks: ours in red, peers, and the floor dashed.

    Raises:
        InputError: no two cases differ in one of the axes alone.
        UnsupportedError: matplotlib is missing; it comes with the extra ``[plots]``.
    """
    found = drawn(curves(rows))
    if not found:
        raise InputError(
            "bench.plot",
            "timed rows of groups that differ in size, number or tokens",
            "no two such rows",
            "Measure more cases: fastlinear bench groups.",
        )
    names = dict.fromkeys(n for c in found for times in c.times.values() for n in times)
    peers = [name for name in names if name not in _OURS]
    looks = {name: (color, "-", "D") for name, color in _OURS.items()}
    for i, name in enumerate(peers):
        line, mark = ("-", "o") if i < len(_COLORS) else (":", "^")
        looks[name] = _COLORS[i % len(_COLORS)], line, mark
    floor = "floor: bytes"
    if not all(curve.memory for curve in found):
        floor += ", or products where longer"
    panel = partial(_panel, looks=looks, floor=floor)
    curves_in_panels(path, found, panel, dpi=100, palette=256)
    return path


def _panel(ax: Any, curve: Curve, looks: dict[str, tuple[str, str, str]], floor: str) -> None:
    for name, (color, line, mark) in looks.items():
        points = [(at, times[name]) for at, times in curve.times.items() if name in times]
        if not points:
            continue
        ours = name == OURS
        ax.plot(
            *zip(*points, strict=True),
            label=name,
            color=color,
            linewidth=2.2 if ours else 1.0,
            linestyle=line,
            marker=mark,
            markersize=4 if ours else 3,
            zorder=4 if name in _OURS else 3,
        )
    if curve.floors:
        style = {"color": "black", "linewidth": 1.4, "linestyle": "--", "zorder": 5}
        ax.plot(*zip(*curve.floors.items(), strict=True), label=floor, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    told = _far_apart(curve.times)
    marks = [f"{at}\nG={curve.groups[at]}" if curve.groups else f"{at}" for at in told]
    ax.set_xticks(told, marks)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.grid(linewidth=0.3)
    ax.set_xlabel(curve.axis)
    ax.set_ylabel("µs")
    ax.set_title(curve.title, loc="left", fontsize=9)


def _far_apart(points: Iterable[int]) -> list[int]:
    """Of points on a logarithmic axis those below which there is room for words."""
    found: list[int] = []
    at = sorted(points)
    span = math.log2(at[-1] / at[0])
    for point in at:
        if not found or math.log2(point / found[-1]) > _APART * span:
            found.append(point)
    return found
