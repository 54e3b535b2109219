"""Heat-mapped tables of experiment ``overhead``: speed against eager over layers, batch, width."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.overhead.headroom import best_rates, floor_us
from benchmarks.harness.case import TIMED
from benchmarks.harness.figure import written
from benchmarks.harness.rows import Row
from fastlinear.core.errors import InputError

BASELINE = "eager"
FLOOR = "floor"
COLUMNS = {
    FLOOR: "products alone, at the best measured rate",
    "hand_loop": "overhead removed",
    "fastlinear[layerwise]": "+ pointwise fusion",
    "fastlinear[graph]": "+ pointwise fusion, CUDA graph",
    "fastlinear[strassen]": "fused Strassen",
    "strassen_control": "same tiling, classical",
    "fastlinear": "fastlinear's choice",
    "fastlinear_cuda_graph": "its choice, recorded",
    "fastlinear_fast": "its choice, fast matmul allowed",
}
"""What each contender stands for in the document; the others go by their own names."""
_CLIP = 3.0  # colours end at 8x faster and 8x slower
_ACROSS = 6  # panels side by side
_CELL = 0.36, 0.17  # inches

Cell = tuple[int, int, int]


@dataclass(frozen=True)
class Heat:
    """Speeds of all contenders for one dtype, direction and metric.

    Attributes:
        title: device, dtype, metric and direction.
        rows: (layers, batch), most layers and largest batch first.
        widths: hidden widths, ascending.
        speeds: contender → (layers, batch, width) → time of eager over its time; on a CPU
            ``FLOOR`` stands for the products alone of ``bench.headroom``.
        left_out: the cells that nobody was measured in → why.
    """

    title: str
    rows: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    speeds: dict[str, dict[Cell, float]]
    left_out: dict[Cell, str]


def heats(rows: Iterable[Row]) -> list[Heat]:
    """One Heat a (device, dtype, metric); cells without a time of eager are left out.

    Raises:
        InputError: no timed row of experiment ``overhead``.
    """
    times: dict[tuple[str, str, str, str], dict[str, dict[Cell, float]]] = {}
    left: dict[tuple[str, str, str, str], dict[Cell, str]] = {}
    known = [row for row in rows if row["experiment"] == "overhead"]
    rates = best_rates(known)
    for row in known:
        case = row["case"]
        key = (row["env"]["device"]["name"], case["dtype"], row["metric"], row["direction"])
        cell = (case["dims"]["L"], case["dims"]["M"], case["dims"]["H"])
        if case.get("left_out") and row["skipped"]:
            left.setdefault(key, {})[cell] = row["skipped"]
        if row["metric"] in TIMED and row["median_us"] is not None:
            times.setdefault(key, {}).setdefault(row["contender"], {})[cell] = row["median_us"]
            if (us := floor_us(row, rates)) is not None:
                times[key].setdefault(FLOOR, {})[cell] = us
    found = []
    for key, contenders in times.items():
        device, dtype, metric, direction = key
        base = contenders.pop(BASELINE, {})
        if base:
            left_out = left.get(key, {})
            rows_of = sorted({cell[:2] for cell in (*base, *left_out)}, reverse=True)
            speeds = {
                name: {cell: base[cell] / us for cell, us in cells.items() if cell in base}
                for name, cells in contenders.items()
            }
            widths = tuple(sorted({cell[2] for cell in (*base, *left_out)}))
            title = f"{device}, {dtype}, {metric} time"
            title += "" if direction == "forward" else f", {direction}"
            found.append(Heat(title, tuple(rows_of), widths, _ordered(speeds), left_out))
    if not found:
        raise InputError(
            "bench.heatmap",
            "timed rows of experiment overhead",
            "none",
            "Run `fastlinear bench overhead` with eager among the contenders.",
        )
    return found


def heatmap(rows: Iterable[Row], path: str | Path) -> Path:
    """Draw one panel a contender, green where it is faster than eager and red where slower.

    Args:
        rows: rows of experiment ``overhead``.
        path: a ``.png`` or ``.svg`` file; folders are made.

    Raises:
        InputError: no such row.
        UnsupportedError: matplotlib is missing; it comes with the extra ``[plots]``.
    """
    drawn = heats(rows)
    path = Path(path)
    across = min(_ACROSS, max(len(h.speeds) for h in drawn))
    downs = [math.ceil(len(h.speeds) / across) for h in drawn]
    heights = [down * (len(h.rows) + 4) for h, down in zip(drawn, downs, strict=True)]
    wide, high = _CELL
    width = across * (0.7 + wide * max(len(h.widths) for h in drawn))
    size = width, 0.4 * len(drawn) + high * sum(heights)
    with written(path, size, function="bench.heatmap", font=6) as figure:
        parts = figure.subfigures(len(drawn), 1, squeeze=False, height_ratios=heights)
        for part, heat, down in zip(parts[:, 0], drawn, downs, strict=True):
            part.suptitle(f"{heat.title}: speed relative to eager", x=0.01, ha="left")
            axes = part.subplots(down, across, squeeze=False).ravel()
            for ax in axes[len(heat.speeds) :]:
                ax.set_axis_off()
            for ax, (name, speeds) in zip(axes, heat.speeds.items(), strict=False):
                _panel(ax, heat, name, speeds)
    return path


def _panel(ax: Any, heat: Heat, name: str, speeds: dict[Cell, float]) -> None:
    """One contender's table: the rows (layers, batch) it took part in, columns widths; ``skip``
    where nobody was measured."""
    wide, high = _CELL
    rows = [row for row in heat.rows if any((*row, w) in speeds for w in heat.widths)]
    values = [[speeds.get((*row, w), math.nan) for w in heat.widths] for row in rows]
    colours = [[math.nan if math.isnan(v) else math.log2(v) for v in line] for line in values]
    ax.set_facecolor("#dddddd")
    ax.imshow(colours, cmap="RdYlGn", vmin=-_CLIP, vmax=_CLIP, aspect=high / wide)
    ax.set_anchor("N")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if not math.isnan(value):
                colour = "white" if abs(math.log2(value)) > 0.75 * _CLIP else "black"
                ax.text(x, y, _short(value), ha="center", va="center", fontsize=5, color=colour)
    for n, m, width in heat.left_out:
        if (n, m) in rows:
            place = heat.widths.index(width), rows.index((n, m))
            ax.text(*place, "skip", ha="center", va="center", fontsize=4, color="#666666")
    ax.set_xticks(range(len(heat.widths)), [str(w) for w in heat.widths], rotation=90)
    ax.set_yticks(range(len(rows)), [f"{n} x {m}" for n, m in rows])
    label = COLUMNS.get(name)
    ax.set_title(f"{label}\n{name}" if label else f"\n{name}", fontsize=6)
    ax.tick_params(length=0)


def print_heat(rows: Iterable[Row]) -> None:
    """The same tables in the terminal, as many side by side as it is wide."""
    from rich.columns import Columns
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:  # a pipe has no width; keep lines whole
        console = Console(width=160)
    for heat in heats(rows):
        console.print(Text(f"{heat.title}: speed relative to eager", style="bold"))
        tables = []
        for name, speeds in heat.speeds.items():
            title = f"{COLUMNS[name]}\n{name}" if name in COLUMNS else f"\n{name}"
            table = Table("layers", "batch", title=Text(title), box=None, pad_edge=False)
            for w in heat.widths:
                table.add_column(str(w), justify="right")
            for n, m in heat.rows:
                cells = [
                    Text("skip", style="dim")
                    if (n, m, w) in heat.left_out
                    else _coloured(speeds.get((n, m, w)))
                    for w in heat.widths
                ]
                table.add_row(str(n), str(m), *cells)
            tables.append(table)
        console.print(Columns(tables, padding=(0, 4)))
        for why in dict.fromkeys(heat.left_out.values()):
            console.print(Text(f"skip: {why}", style="dim"))


def _coloured(value: float | None) -> Any:
    """A speed on its colour: red at 8x slower, through yellow at 1, to green at 8x faster."""
    from rich.text import Text

    if value is None:
        return Text("-", style="dim")
    place = max(-1.0, min(1.0, math.log2(value) / _CLIP))
    red, green = (255, round(230 * (1 + place))) if place < 0 else (round(255 * (1 - place)), 230)
    return Text(_short(value), style=f"black on rgb({red},{green},110)")


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"


def _ordered(speeds: dict[str, dict[Cell, float]]) -> dict[str, dict[Cell, float]]:
    """The document's columns first, then fastlinear's backends, then the peers."""
    known = [name for name in COLUMNS if name in speeds]
    ours = sorted(n for n in speeds if n.startswith("fastlinear") and n not in known)
    peers = sorted(n for n in speeds if n not in known and n not in ours)
    return {name: speeds[name] for name in (*known, *ours, *peers)}
