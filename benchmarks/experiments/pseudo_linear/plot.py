"""The pseudo-Linear document's curves: speed-up over a full layer by width, measured and expected.

One panel for each kind of call, in a grid: a line of panels for each dtype, activation and
direction, a column for each batch and metric.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.contenders.diagonal_machine import LINEAR
from benchmarks.experiments.pseudo_linear.table import TOLERANCE, Curve, curves
from benchmarks.harness.figure import legend, written
from benchmarks.harness.peer import OURS
from benchmarks.harness.rows import Row
from fastlinear.core.errors import InputError

_LONG = 4  # widths of a curve
_PANEL = 4.2, 2.6  # inches
_LOOKS: dict[str, dict[str, Any]] = {  # those a reader asks about; of one colour recorded or not
    "eager": {"color": "#4c72b0"},
    "cuda_graph": {"color": "#4c72b0", "linestyle": ":"},
    "compile": {"color": "#55a868"},
    "compile_reduce_overhead": {"color": "#55a868", "linestyle": ":"},
    f"{OURS}_cuda_graph": {"color": "#c44e52", "linestyle": ":"},
    OURS: {"color": "#c44e52", "linewidth": 2.2, "marker": "D", "markersize": 4, "zorder": 5},
}
_OTHERS = {"color": "#c8c8c8", "linewidth": 0.8, "zorder": 2}
_NO_LAYERS = ("_bare_",)  # measures of something else


def plot(rows: Iterable[Row], path: str | Path) -> Path:
    """Draw speed-up over Linear by width: lines for what was measured, dashes for the model, with
    the 25% around it that count as agreement.

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
    lines = sorted({_line(c) for c in found})
    columns = sorted({(-c.m, c.metric) for c in found})
    width, height = _PANEL
    size = max(7.0, width * len(columns)), 0.9 + height * len(lines)
    with written(path, size, dpi=100) as figure:
        axes = figure.subplots(len(lines), len(columns), squeeze=False)
        for ax in axes.flatten():
            ax.set_axis_off()
        for curve in found:
            column = columns.index((-curve.m, curve.metric))
            ax = axes[lines.index(_line(curve)), column]
            ax.set_axis_on()
            _panel(ax, curve)
            if column == 0:
                ax.set_ylabel("times faster than nn.Linear")
        legend(figure, axes.flatten(), columns=4)
    return path


def _line(curve: Curve) -> tuple[str, str, str]:
    """What a line of panels shares, in the order of the document: no activation first."""
    activation = "" if curve.activation == "none" else curve.activation
    return curve.dtype, activation, curve.direction


def _panel(ax: Any, curve: Curve) -> None:
    names = dict.fromkeys(name for s in curve.speedups.values() for name in s)
    shown = [n for n in names if n != LINEAR and not n.startswith(f"{OURS}[")]
    shown = [n for n in shown if not any(word in n for word in _NO_LAYERS)]
    for name in sorted(shown, key=lambda n: list(_LOOKS).index(n) if n in _LOOKS else -1):
        widths = [w for w, s in curve.speedups.items() if name in s]
        look = {"linewidth": 1.2, "marker": "o", "markersize": 2.5, "zorder": 3}
        look |= _LOOKS.get(name, _OTHERS)
        label = name if name in _LOOKS else "other contenders"
        ax.plot(widths, [curve.speedups[w][name] for w in widths], label=label, **look)
    if curve.expected:
        widths, times = [*curve.expected], [*curve.expected.values()]
        style = {"color": "black", "linewidth": 1.3, "linestyle": "--", "zorder": 6}
        ax.plot(widths, times, label=f"expected of {OURS}", **style)
        band = [[t * f for t in times] for f in (1 - TOLERANCE, 1 + TOLERANCE)]
        label = f"within {100 * TOLERANCE:.0f}% of that"
        ax.fill_between(widths, *band, color="black", alpha=0.08, linewidth=0, label=label)
    ax.axhline(1.0, color="black", linewidth=0.6)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}x")
    ax.grid(linewidth=0.3)
    ax.set_xlabel("width")
    act = "" if curve.activation == "none" else f" + {curve.activation}"
    rows = "1 row" if curve.m == 1 else f"{curve.m} rows"
    title = f"{curve.dtype}, {curve.direction}{act}\n{rows}, {curve.metric} time"
    ax.set_title(title, loc="left", fontsize=9)
