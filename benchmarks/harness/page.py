"""Benchmark rows as one self-contained HTML page: a group a problem, direction and metric."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.above import notes_above
from benchmarks.harness.own import OURS, default_behind_own
from fastlinear.core.plain_text import plain_data
from fastlinear.report.page import render
from fastlinear.report.text import problem as problem_text
from fastlinear.report.views import device_name, environment

_METRICS = {
    "wall": "wall time",
    "device": "device time",
    "first_call": "first call",
    "peak_memory": "peak memory",
}


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The page of rows: inline CSS and SVG, no script, nothing fetched."""
    return render(Path(__file__).with_name("bench.html.j2"), _view(plain_data(list(rows))))


def _view(rows: list[dict[str, Any]]) -> dict[str, Any]:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        name = problem_text(row.get("problem"))
        groups[(name, row.get("direction", ""), row.get("metric", ""))].append(row)
    shown = [_group(*key, members) for key, members in groups.items()]
    summary = [g for g in shown if g["ours"] is not None]
    first = rows[0] if rows else {}
    return {
        "title": first.get("experiment") or "Benchmark",
        "groups": shown,
        "summary": summary,
        "wins": sum(1 for g in summary if g["speedup"] > 1.02 and g["low"] > 1),
        "losses": sum(1 for g in summary if g["speedup"] < 0.98),
        "in_noise": sum(1 for g in summary if g["speedup"] < 0.98 <= g["high"]),
        "own": [str(loss) for loss in default_behind_own(rows)],
        "ratio_top": max([2.0, *(g["high"] for g in summary)]) * 1.02,
        "rows": len(rows),
        "above": notes_above(rows),
        "command": first.get("command", ""),
        "environment": environment(first.get("env")),
        "device": device_name({"environment": first.get("env")}),
    }


def _group(name: str, direction: str, metric: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    field = "peak_bytes" if metric == "peak_memory" else "median_us"
    measured = sorted(
        ({**r, "value": r[field]} for r in rows if r.get(field) is not None),
        key=lambda r: float(r["value"]),
    )
    ours = next((r for r in measured if r["contender"] == OURS and r.get("ratio_ci95")), None)
    peer = next((r for r in measured if ours and r["contender"] == ours["best_peer"]), None)
    group = {
        "name": name,
        "direction": direction,
        "metric": _METRICS.get(metric, metric),
        "memory": metric == "peak_memory",
        "rows": measured,
        "left_out": [(r["contender"], _why_not(r)) for r in rows if r.get(field) is None],
        "top": max((r["value"] for r in measured), default=1.0) or 1.0,
        "ours": ours if peer else None,
        "peer": peer,
    }
    if ours and peer:  # the rows hold time over the best peer's time; a page says how much faster
        low, high = (1 / bound for bound in reversed(ours["ratio_ci95"]))
        group |= {"speedup": 1 / ours["ratio_to_best"], "low": low, "high": high}
    return group


def _why_not(row: dict[str, Any]) -> str:
    """Why a contender has no number in its row."""
    if row.get("skipped"):
        return str(row["skipped"])
    return "less accurate than allowed" if row.get("valid") is False else "not measured"
