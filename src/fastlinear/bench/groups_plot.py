"""Curves of experiment ``groups``: time over the size of a group, the number of groups and the
tokens, with the floor drawn in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlinear.bench.case import TIMED
from fastlinear.bench.figure import curves_in_panels
from fastlinear.bench.peer import OURS
from fastlinear.bench.rows import Row
from fastlinear.core.errors import InputError

EXPERIMENT = "groups"
_COLORS = ("#8c8c8c", "#4c72b0", "#55a868", "#8172b3", "#ccb974", "#64b5cd", "#937860")
_OURS = {
    OURS: "#c44e52",
    f"{OURS}_groups": "#dd8452",
    f"{OURS}_channels": "#e377c2",
    f"{OURS}_sequences": "#b07aa1",
}

Dims = dict[str, int]


@dataclass(frozen=True)
class Curve:
    """What one panel shows.

    Attributes:
        title: what holds for all of it.
        axis: what its points differ in.
        times: point → contender → microseconds; forced backends are left out.
        floors: point → the least time the measured ceilings allow, in microseconds.
        memory: whether bytes set the floor at every point.
        groups: point → number of groups, where that differs from point to point as well.
    """

    title: str
    axis: str
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
    dtype, activation, direction, metric, held = key
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
    return Curve(title, axis, times, floors, memory, groups if several else {})


def plot(rows: Iterable[Row], path: Path) -> Path:
    """Draw the curves: ours in red, peers, and the floor dashed.

    Raises:
        InputError: no two cases differ in one of the axes alone.
        UnsupportedError: matplotlib is missing; it comes with the extra ``[plots]``.
    """
    found = curves(rows)
    if not found:
        raise InputError(
            "bench.plot",
            "timed rows of groups that differ in size, number or tokens",
            "no two such rows",
            "Measure more cases: fastlinear bench groups.",
        )
    names = dict.fromkeys(n for c in found for times in c.times.values() for n in times)
    peers = [name for name in names if name not in _OURS]
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(peers)} | _OURS
    curves_in_panels(path, found, lambda ax, curve: _panel(ax, curve, colors))
    return path


def _panel(ax: Any, curve: Curve, colors: dict[str, str]) -> None:
    for i, (name, color) in enumerate(colors.items()):
        points = [(at, times[name]) for at, times in curve.times.items() if name in times]
        if not points:
            continue
        ours = name == OURS
        ax.plot(
            *zip(*points, strict=True),
            label=name,
            color=color,
            linewidth=2.2 if ours else 1.0,
            linestyle="-" if name in _OURS or i < len(_COLORS) else ":",
            marker="D" if name in _OURS else "o",
            markersize=4 if ours else 3,
            zorder=4 if name in _OURS else 3,
        )
    if curve.floors:
        label = "floor: bytes" if curve.memory else "floor: bytes, or products where longer"
        style = {"color": "black", "linewidth": 1.4, "linestyle": "--", "zorder": 5}
        ax.plot(*zip(*curve.floors.items(), strict=True), label=label, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    marks = [f"{at}\nG={curve.groups[at]}" if curve.groups else f"{at}" for at in curve.times]
    ax.set_xticks(list(curve.times), marks)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")
    ax.grid(linewidth=0.3)
    ax.set_xlabel(curve.axis)
    ax.set_ylabel("µs")
    ax.set_title(curve.title, loc="left", fontsize=9)
