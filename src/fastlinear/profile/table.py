"""A profile as plain text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from fastlinear.core.text_table import as_text, table
from fastlinear.profile import own_calls
from fastlinear.profile.records import Finding, NotFollowed, ProfileData
from fastlinear.profile.unfollowed import with_hint
from fastlinear.report.text import count, step_of

NO_LINEARS = (
    "no linear layers here, neither modules nor products with parameters that a forward writes"
)
_NARROW = 80  # columns below which findings leave out flops, bytes and their limit
_REST = 5  # names told of what no module holds
_SPEAKS_FOR_ITSELF = "linear_activation"  # its title says all, unless it is left alone


def render(report: ProfileData, rows: int, width: int) -> str:
    """What is unattributed, the slowest modules, and findings with the advice that goes with
    them."""
    cuda = report.device.startswith("cuda")
    parts: list[Any] = [
        f"{report.model_class}, {report.mode}, {report.device}: {report.step_us:.0f} µs a step "
        f"({step_of(report.mode)}), {report.attributed:.1%} attributed to modules",
        _unattributed(report, cuda),
        *([] if report.sites else [no_linears(report.findings)]),
        *(f"note: {note}" for note in report.notes),
        "",
        f"Slowest modules (own {'kernel' if cuda else 'CPU'} time, µs per step)",
        _modules(report, rows, width, cuda),
        "",
    ]
    if report.findings:
        parts += [
            "Findings (µs per step; the floor is the roofline's; gains are estimates and overlap)",
            _findings(report.findings[:rows], width),
            "",
        ]
        if len(report.findings) > rows:
            parts.append(f"… and {len(report.findings) - rows} more findings.")
        parts += _advice(report.findings)
    else:
        parts.append("No findings: nothing to do.")
    parts += not_followed(report.not_followed, rows, width)
    return as_text(parts, width)


def not_followed(left: Sequence[NotFollowed], rows: int, width: int) -> list[Any]:
    """The weights that are no followed site's, those of one kind as one row."""
    kinds: dict[str, list[NotFollowed]] = defaultdict(list)
    for one in left:
        kinds[with_hint(one)].append(one)
    if not kinds:
        return []
    ranked = sorted(kinds.items(), key=lambda item: -sum(one.share for one in item[1]))
    shown = []
    for why, alike in ranked[:rows]:
        more = f" (+{len(alike) - 1} alike)" if len(alike) > 1 else ""
        share = f"{sum(one.share for one in alike):.1%}"
        shown.append((alike[0].fqn + more, share, why))
    more_kinds = len(ranked) - rows
    return [
        "",
        f"Not followed: {sum(one.share for one in left):.1%} of the flops of one forward's "
        "products, with weights that other code than a linear layer's multiplies by",
        table(("weight", ">share", "why"), shown, width=width),
        *([f"… and {more_kinds} more kinds of weights."] if more_kinds > 0 else []),
    ]


def no_linears(findings: Iterable[Finding]) -> str:
    """What is said of a model without sites."""
    hidden = sum(f.code == own_calls.CODE for f in findings)
    if not hidden:
        return NO_LINEARS
    some = "a module defines" if hidden == 1 else f"{hidden} modules define"
    return f"no linear layers were seen here, but {some} __call__ and so cannot be seen (below)"


def _unattributed(report: ProfileData, cuda: bool) -> str:
    """What no ranking or finding below speaks of: time that falls inside no module."""
    total = sum(us for _, us in report.unattributed)
    share = (
        f"Unattributed: {1.0 - report.attributed:.1%} of the {'kernel time' if cuda else 'step'}"
    )
    if not report.unattributed:
        return f"{share}; nothing names it" if report.attributed < 1.0 else share
    names = ", ".join(f"{name} {us:.1f}" for name, us in report.unattributed[:_REST])
    left = len(report.unattributed) - _REST
    more = f" and {left} more" if left > 0 else ""
    return f"{share}, {total:.1f} µs outside of all modules: {names}{more} (µs per step)"


def _modules(report: ProfileData, rows: int, width: int, cuda: bool) -> Any:
    by_module: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for r in report.records:
        by_module[r.fqn, r.module_class][r.direction] += r.device_us if cuda else r.cpu_us
    total = sum(sum(times.values()) for times in by_module.values())
    total += sum(us for _, us in report.unattributed)
    directions = ("forward", "backward") if report.mode == "train" else ("forward",)
    shown = []
    slowest = sorted(by_module.items(), key=lambda item: -sum(item[1].values()))
    for (fqn, cls), times in slowest[:rows]:
        share = sum(times.values()) / total if total else 0.0
        us = (f"{times[direction]:.1f}" for direction in directions)
        shown.append((fqn or "(model)", cls, *us, f"{share:.1%}"))
    names = ("module", "class", *(f">{direction}" for direction in directions), ">share")
    return table(names, shown, width=width)


def _findings(findings: tuple[Finding, ...], width: int) -> Any:
    names = ["module", "finding", ">flops", ">bytes", "limit", ">floor", ">measured", ">gain"]
    shown = [
        [
            f.fqn or "(model)",
            f.title,
            count(f.flops).replace(" ", ""),
            count(f.bytes).replace(" ", ""),
            f.bound,
            f"{f.floor_us:.1f}",
            f"{f.measured_us:.1f}",
            f"{f.predicted_gain_us:.1f}",
        ]
        for f in findings
    ]
    if width < _NARROW:
        names, shown = names[:2] + names[5:], [row[:2] + row[5:] for row in shown]
    return table(names, shown, width=width)


def _advice(findings: tuple[Finding, ...]) -> list[str]:
    """What the largest finding of each kind says."""
    first: dict[str, Finding] = {}
    for f in findings:
        if f.code != _SPEAKS_FOR_ITSELF or "left_alone" in f.details:
            first.setdefault(f.code, f)
    return [f"{f.fqn or '(model)'}: {f.title}. {f.message}" for f in first.values()]
