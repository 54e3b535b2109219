"""A Result as a plain-text table."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

from fastlinear.core.text_table import as_text, table
from fastlinear.core.timing import Ratio
from fastlinear.profile.records import Finding
from fastlinear.profile.table import no_linears
from fastlinear.report.text import step_of
from fastlinear.rewrite.outcome import Outcome
from fastlinear.rewrite.site_outcome import SiteOutcome

_COLUMNS = ("module", "activation", ">calls", "backend")
_TIMES = (">predicted gain µs", ">before µs", ">after µs", ">speed-up", "outcome")
_OF_THE_STEP = ("graphed", "compiled")  # rules whose times are the whole step's
_MOST_ADVICE = 8  # kinds of findings that are told
_NARROW = 110  # columns below which the table's own are too many


def render(result: Outcome, width: int) -> str:
    """The text of ``Result.table``: sites of one kind and one fate are folded into one row, or
    into one paragraph where a table would be too wide; of those without times sizes may differ."""
    parts: list[Any] = []
    if result.sites:
        parts = _paragraphs(result, width) if width < _NARROW else [_table(result, width)]
        parts.append("")
    parts += [_step(result), _counts(result)]
    parts += _advice(result, width)
    parts += [f"note: {note}" for note in (*_note_of_pairs(result), *result.notes)]
    return as_text(parts, width)


def _table(result: Outcome, width: int) -> Any:
    rows = [
        (
            names,
            site.activation or "-",
            site.calls,
            site.backend or "-",
            _number(site.predicted_gain_us),
            _number(site.before_us),
            _number(site.after_us),
            "-" if site.speedup is None else f"{site.speedup:.2f}x{_tempered(site)}",
            f"{site.status.replace('_', ' ')}: {_reason(site)}",
        )
        for names, site in _folded(result)
    ]
    return table((*_COLUMNS, *_TIMES), rows, width=width)


def _paragraphs(result: Outcome, width: int) -> list[str]:
    shown = []
    for names, site in _folded(result):
        facts = [f"{site.status.replace('_', ' ')}: {_reason(site).rstrip('.')}."]
        if site.predicted_gain_us is not None:
            facts.append(f"Predicted gain {site.predicted_gain_us:.1f} µs.")
        if site.speedup is not None:
            facts.append(
                f"{_number(site.before_us)} -> {_number(site.after_us)} µs, "
                f"{site.speedup:.2f}x{_tempered(site)}."
            )
        found = "" if site.activation in (None, "none") else f", {site.activation}"
        text = f"{names}{found}: {' '.join(facts)}"
        shown.append(textwrap.fill(text, width, subsequent_indent="    "))
    return shown


def _step(result: Outcome) -> str:
    where = f"{result.model_class}, {result.mode} on {result.device}: "
    step = f"a step ({step_of(result.mode)})"
    if not result.kept:
        return f"{where}{result.before_us:.0f} µs {step}; nothing was kept, the model is as it was"
    ratio = result.speedup
    text = (
        f"{where}{result.before_us:.0f} µs -> {result.after_us:.0f} µs {step}, "
        f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}] in interleaved pairs"
    )
    if ratio.low > 1.0:
        return text
    text += ": no difference beyond noise" if ratio.within_noise else ": slower beyond noise"
    alone = [s.before_us - s.after_us for s in _timed(result) if s.rule not in _OF_THE_STEP]
    gained = sum(alone)
    return f"{text}, though the kept sites alone gained {gained:.1f} µs" if gained > 0 else text


def _timed(result: Outcome) -> list[Any]:
    """The kept sites with times of their own."""
    return [s for s in result.sites if s.status == "kept" and s.before_us and s.after_us]


def _tempered(site: SiteOutcome) -> str:
    """What is to be said beside a speed-up, after a comma."""
    if site.ci95 is None or site.speedup is None:
        return ""
    if Ratio(site.speedup, *site.ci95).within_noise:
        return ", within noise"
    return ", by pairs" if _otherwise(site.before_us, site.after_us, site.speedup) else ""


def _otherwise(before: float | None, after: float | None, speedup: float) -> bool:
    """Whether the medians of all rounds order otherwise than the pairs do."""
    return bool(before and after and (after < before) != (speedup > 1.0))


def _note_of_pairs(result: Outcome) -> list[str]:
    """Why times and speed-ups may seem to contradict each other, where they do."""
    step = result.kept and not result.speedup.within_noise
    noisy = step and _otherwise(result.before_us, result.after_us, result.speedup.median)
    if not noisy and not any(_tempered(s).endswith("pairs") for s in result.sites):
        return []
    return [
        "a speed-up is the median over interleaved pairs; where the medians before and after order "
        "otherwise, the machine's speed changed meanwhile, and the pairs count"
    ]


def _counts(result: Outcome) -> str:
    if not result.sites:
        return f"{no_linears(result.findings)}: nothing to optimize"
    counts = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in result.summary().items())
    graphs = [s for s in result.sites if s.rule == "graphed"]
    compiled = [s for s in result.sites if s.rule == "compiled"]
    blocks = sum(s.fqn != "" for s in compiled)
    groups = sum(s.route == "own" for s in result.sites)
    linears = len(result.sites) - len(graphs) - len(compiled) - groups
    parts = sum(s.fqn != "" for s in graphs)
    text = f"{linears} linear site" if linears == 1 else f"{linears} linear sites"
    text += f" and {groups} grouped layers" if groups > 1 else " and a grouped layer" * groups
    text += " and the whole model" if parts < len(graphs) else ""
    text += f" and {parts} of its parts" if parts else ""
    text += " and the model compiled" if compiled else ""
    text += f" and {blocks} blocks of it" if blocks else ""
    return f"{text}: {counts}"


def _advice(result: Outcome, width: int) -> list[str]:
    """What findings say that ``optimize_`` leaves to the reader, those of one kind and title as
    one, the largest gain first."""
    told: dict[tuple[str, str], list[Finding]] = {}
    for f in sorted(result.findings, key=lambda f: -f.predicted_gain_us):
        if f.advice is not None:
            told.setdefault((f.code, f.title), []).append(f)
    if not told:
        return []
    lines = ["", "advice, which optimize_ leaves to you:"]
    for alike in list(told.values())[:_MOST_ADVICE]:
        first, *others = alike
        gain = sum(f.predicted_gain_us for f in alike)
        more = f" (+{len(others)} alike)" if others else ""
        saves = f", about {gain:.1f} µs a step" if gain > 0 else ""
        text = f"{first.fqn or '(model)'}{more}: {first.title}{saves}. {first.message}"
        kept = {"initial_indent": "  ", "subsequent_indent": "    ", "break_on_hyphens": False}
        lines.append(textwrap.fill(text, width, **kept))  # type: ignore[arg-type]
    left = len(told) - _MOST_ADVICE
    return [*lines, f"  and {left} more in result.findings"] if left > 0 else lines


def _folded(result: Outcome) -> list[tuple[str, SiteOutcome]]:
    groups: dict[tuple[object, ...], list[SiteOutcome]] = {}
    for site in result.sites:
        told: tuple[str, ...] = (_number(site.predicted_gain_us),)  # no sizes, where no times are
        if site.part_of is None and site.status not in ("refused", "undecided", "nothing_to_do"):
            told = tuple(map(str, (site.problem or {}).items()))
        backend = site.backend
        key = (site.status, site.code, site.activation, backend, site.reason, site.calls)
        groups.setdefault((*key, told, site.part_of), []).append(site)
    rows = []
    for members in groups.values():
        more = f" (+{len(members) - 1} alike)" if len(members) > 1 else ""
        rows.append(((members[0].fqn or "(model)") + more, _as_told(result, members[0])))
    return rows


def _as_told(result: Outcome, site: SiteOutcome) -> SiteOutcome:
    """Numbers of one call beside the first linear that it computes, and there alone."""
    if site.part_of is not None:
        none = dict.fromkeys(("predicted_gain_us", "before_us", "after_us", "speedup", "ci95"))
        return replace(site, **none)  # type: ignore[arg-type]
    parts = [s for s in result.sites if (s.part_of, s.rule) == (site.fqn, site.rule)]
    parts.append(site)
    names = ("predicted_gain_us", "before_us", "after_us")
    known = {name: [v for s in parts if (v := getattr(s, name)) is not None] for name in names}
    return replace(site, **{name: sum(vs) for name, vs in known.items() if vs})  # type: ignore[arg-type]


def _reason(site: SiteOutcome) -> str:
    if site.part_of is None:
        return site.reason
    fate = ", one call with it" if site.status == "kept" else f": {site.reason}"
    return f"part of {site.part_of!r}{fate}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
