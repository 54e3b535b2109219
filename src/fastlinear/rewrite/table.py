"""A Result as a plain-text table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlinear.core.text_table import as_text, table

if TYPE_CHECKING:
    from fastlinear.rewrite.result import Result, SiteOutcome

_COLUMNS = ("module", "activation", ">calls", "backend")
_TIMES = (">predicted gain µs", ">before µs", ">after µs", ">speed-up", "outcome")


def render(result: Result, width: int) -> str:
    """The text of ``Result.table``: sites of one kind and one fate are folded into one row."""
    rows = [
        (
            names,
            site.activation or "-",
            site.calls,
            site.backends.get("forward", "-"),
            _number(site.predicted_gain_us),
            _number(site.before_us),
            _number(site.after_us),
            "-" if site.speedup is None else f"{site.speedup:.2f}x",
            f"{site.status.replace('_', ' ')}: {site.reason}",
        )
        for names, site in _folded(result)
    ]
    parts: list[Any] = []
    if rows:
        parts = [table((*_COLUMNS, *_TIMES), rows, width=width), ""]
    parts += [_step(result), _counts(result)]
    parts += [f"note: {note}" for note in result.notes]
    return as_text(parts, width)


def _step(result: Result) -> str:
    where = f"{result.model_class}, {result.mode} on {result.device}: "
    if not result.kept:
        return f"{where}{result.before_us:.0f} µs a step; nothing was kept, the model is as it was"
    ratio = result.speedup
    return (
        f"{where}{result.before_us:.0f} µs -> {result.after_us:.0f} µs a step, "
        f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
    )


def _counts(result: Result) -> str:
    counts = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in result.summary().items())
    graphs = [s for s in result.sites if s.rule == "graphed"]
    linears, parts = len(result.sites) - len(graphs), sum(s.fqn != "" for s in graphs)
    text = f"{linears} linear site" if linears == 1 else f"{linears} linear sites"
    text += " and the whole model" if parts < len(graphs) else ""
    text += f" and {parts} of its parts" if parts else ""
    return f"{text}: {counts}"


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
