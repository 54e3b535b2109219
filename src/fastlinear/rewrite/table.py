"""A Result as a plain-text table. Imports rich: load it only when a table is asked for."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fastlinear.rewrite.result import Result, SiteOutcome

_WIDTH = 140


def render(result: Result) -> str:
    """The text of ``Result.table``: sites of one kind and one fate are folded into one row."""
    table = Table(box=SIMPLE, title=None, pad_edge=False)
    for name in ("module", "activation", "calls", "backend"):
        table.add_column(name)
    for name in ("predicted us", "before us", "after us", "speed-up"):
        table.add_column(name, justify="right")
    table.add_column("outcome", overflow="fold")
    for names, site in _folded(result):
        table.add_row(
            names,
            site.activation or "-",
            str(site.calls),
            site.backends.get("forward", "-"),
            _number(site.predicted_gain_us),
            _number(site.before_us),
            _number(site.after_us),
            "-" if site.speedup is None else f"{site.speedup:.2f}x",
            f"{site.status.replace('_', ' ')}: {site.reason}",
        )
    counts = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in result.summary().items())
    step = (
        f"{result.model_class}, {result.mode} on {result.device}: "
        f"{result.before_us:.0f} us -> {result.after_us:.0f} us a step, "
        f"{result.speedup.median:.2f}x [{result.speedup.low:.2f}, {result.speedup.high:.2f}]"
    )
    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, highlight=False)
    console.print(table)
    console.print(step)
    linears = sum(s.rule != "graphed" for s in result.sites)
    whole = " and the whole model" if linears < len(result.sites) else ""
    console.print(f"{linears} linear sites{whole}: {counts}")
    for note in result.notes:
        console.print(f"note: {note}")
    return out.getvalue()


def _folded(result: Result) -> list[tuple[str, SiteOutcome]]:
    groups: dict[tuple[object, ...], list[SiteOutcome]] = {}
    for site in result.sites:
        problem = tuple(map(str, (site.problem or {}).items()))
        key = (site.status, site.code, site.activation, problem, site.reason, site.calls)
        groups.setdefault(key, []).append(site)
    rows = []
    for members in groups.values():
        more = f" (+{len(members) - 1} alike)" if len(members) > 1 else ""
        rows.append(((members[0].fqn or "(model)") + more, members[0]))
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
