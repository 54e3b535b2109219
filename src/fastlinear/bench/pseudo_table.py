"""The pseudo-Linear document's tables and curves from rows: speed-up over a full layer by width."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlinear.bench.case import TIMED
from fastlinear.bench.figure import curves_in_panels
from fastlinear.bench.peer import OURS
from fastlinear.bench.rows import Row
from fastlinear.core import text_table
from fastlinear.core.errors import InputError
from fastlinear.core.text_table import PIPE_WIDTH

EXPERIMENT, _LINEAR = "pseudo-linear", "linear"
_TOLERANCE = 0.25
_LONG = 4  # widths of a curve
_COLORS = ("#8c8c8c", "#4c72b0", "#55a868", "#8172b3", "#ccb974", "#64b5cd", "#937860")


@dataclass(frozen=True)
class Curve:
    """One table: the widths of one dtype, batch, activation, direction and metric.

    Attributes:
        title: what it is of.
        metric: ``"wall"`` or ``"device"``.
        speedups: width → contender → time of Linear over its time.
        expected: width → what the model says of fastlinear.
        bounds: width → what Linear, then the diagonal layer waits for in the model.
    """

    title: str
    metric: str
    speedups: dict[int, dict[str, float]]
    expected: dict[int, float]
    bounds: dict[int, tuple[str, str]]


def curves(rows: Iterable[Row]) -> list[Curve]:
    """The tables in the rows, in their order; widths without a timing of Linear are left out."""
    found: dict[tuple[Any, ...], dict[int, dict[str, Row]]] = {}
    for row in rows:
        if row["experiment"] != EXPERIMENT or row["metric"] not in TIMED or not row["median_us"]:
            continue
        case = row["case"]
        kind = (case["dtype"], case["dims"]["M"], case["options"]["activation"])
        key = (*kind, row["direction"], row["metric"])
        found.setdefault(key, {}).setdefault(case["dims"]["K"], {})[row["contender"]] = row
    return [_curve(key, by_width) for key, by_width in found.items()]


def _curve(key: tuple[Any, ...], by_width: dict[int, dict[str, Row]]) -> Curve:
    dtype, m, activation, direction, metric = key
    speedups, expected, bounds = {}, {}, {}
    for width, times in sorted(by_width.items()):
        # a recorded full layer has its own column, as every contender has
        if _LINEAR not in times:
            continue
        base = times[_LINEAR]["median_us"]
        speedups[width] = {name: base / row["median_us"] for name, row in times.items()}
        both = [(times.get(name) or {}).get("chosen") or {} for name in (_LINEAR, OURS)]
        word = f"expected {metric} us"
        if all(word in chosen for chosen in both):
            expected[width] = float(both[0][word]) / float(both[1][word])
            bounds[width] = both[0]["expected bound"], both[1]["expected bound"]
    act = "" if activation == "none" else f" + {activation}"
    title = f"{dtype}, batch {m}, {direction}{act}, {metric} time"
    return Curve(title, metric, speedups, expected, bounds)


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
        share = f"{near} of {total} ({100 * near / total:.0f}%)"
        parts += [f"Expected within {100 * _TOLERANCE:.0f}% of measured: {share}"]
        parts += [f"  {miss}" for miss in misses]
    return text_table.as_text(parts, width)


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
            if abs(guess / found - 1.0) <= _TOLERANCE:
                near += 1
            else:
                words = " / ".join(curve.bounds[width])
                misses.append(
                    f"{curve.title}, width {width}: {found:.2f} measured, {guess:.2f} expected "
                    f"({words})"
                )
    return near, total, misses


def plot(rows: Iterable[Row], path: str | Path) -> Path:
    """Draw speed-up over Linear by width: measured lines, the model's dashed.

    Of a few widths the table tells as much: they are drawn where there is nothing longer.

    Raises:
        InputError: there is no timing of Linear.
        UnsupportedError: matplotlib is missing; it comes with the extra ``[plots]``.
    """
    found = [c for c in curves(rows) if c.speedups]
    found = [c for c in found if len(c.speedups) >= _LONG] or found
    if not found:
        raise InputError(
            "bench.plot",
            "rows with timings of linear",
            "no such row",
            "Let linear take part: speeds are drawn against it.",
        )
    path = Path(path)
    curves_in_panels(path, found, _panel, dpi=100)
    return path


def _panel(ax: Any, curve: Curve) -> None:
    names = _names(curve)
    shown = [n for n in names if n not in (_LINEAR, OURS) and not n.startswith(f"{OURS}[")]
    for i, name in enumerate([*shown, *(n for n in names if n == OURS)]):
        widths = [w for w, s in curve.speedups.items() if name in s]
        ours = name == OURS
        ax.plot(
            widths,
            [curve.speedups[w][name] for w in widths],
            label=name,
            color="#c44e52" if ours else _COLORS[i % len(_COLORS)],
            linewidth=2.0 if ours else 1.0,
            marker="D" if ours else "o",
            markersize=4 if ours else 3,
            zorder=4 if ours else 3,
        )
    if curve.expected:
        style = {"color": "black", "linewidth": 1.2, "linestyle": "--", "zorder": 5}
        ax.plot(*zip(*curve.expected.items(), strict=True), label="expected", **style)
    ax.axhline(1.0, color="black", linewidth=0.6)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}x")
    ax.grid(linewidth=0.3)
    ax.set_xlabel("width")
    ax.set_title(f"speed-up over nn.Linear: {curve.title}", loc="left", fontsize=10)
