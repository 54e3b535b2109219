"""Small charts as inline SVG. Colours are CSS classes, so they follow light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from fastlinear.report.text import duration, times

_WIDTH = 760


def strips(rows: Sequence[tuple[str, str, Sequence[float]]]) -> Markup:
    """One strip of sample dots a row, with its median, on a shared axis starting at zero.

    Args:
        rows: (label, CSS class, samples in microseconds).
    """
    rows = [(label, kind, samples) for label, kind, samples in rows if samples]
    if not rows:
        return Markup("")
    left, right, step = 72, 84, 46
    top = _axis_top(max(max(samples) for _, _, samples in rows))
    inner = _WIDTH - left - right
    height = step * len(rows) + 26
    parts = [_grid(top, left, inner, height - 20)]
    for i, (label, kind, samples) in enumerate(rows):
        y = step * i + step / 2 + 2
        median = sorted(samples)[len(samples) // 2]
        x = left + inner * median / top
        parts.append(Markup('<text x="{}" y="{}" class="label">{}</text>').format(0, y + 4, label))
        parts.append(
            Markup('<rect x="{}" y="{}" width="{:.1f}" height="18" rx="3" class="bar {}"/>').format(
                left, y - 9, x - left, kind
            )
        )
        for j, value in enumerate(samples):
            cx = left + inner * value / top
            cy = y + (j % 5 - 2) * 3.2
            parts.append(
                Markup(
                    '<circle cx="{:.1f}" cy="{:.1f}" r="2.4" class="dot {}">'
                    "<title>{}</title></circle>"
                ).format(cx, cy, kind, duration(value))
            )
        tail = left + inner * max(samples) / top + 10
        parts.append(
            Markup('<text x="{:.1f}" y="{}" class="value">{}</text>').format(
                tail, y + 4, duration(median)
            )
        )
    return _svg(parts, height, "Samples of one step before and after")


def timeline(rows: Sequence[tuple[str, str, float, Sequence[Sequence[Any]]]]) -> Markup:
    """What a call runs, one lane a row on a shared axis of time; names are in the bars where there
    is room, and all of them under the pointer.

    Args:
        rows: (label, CSS class, microseconds of the call, (name, start, length) of what it runs).
    """
    rows = [row for row in rows if row[2] > 0]
    if not rows:
        return Markup("")
    left, step = 72, 40
    inner = _WIDTH - left - 84
    top = _axis_top(max(us for _, _, us, _ in rows))
    height = step * len(rows) + 26
    parts = [_grid(top, left, inner, height - 20)]
    for i, (label, kind, us, spans) in enumerate(rows):
        y = step * i + step / 2
        parts.append(Markup('<text x="0" y="{}" class="label">{}</text>').format(y + 4, label))
        for name, start, length in spans:
            x, width = left + inner * start / top, max(0.8, inner * length / top)
            parts.append(
                Markup(
                    '<rect x="{:.1f}" y="{}" width="{:.1f}" height="22" rx="2" class="bar {}">'
                    "<title>{}: {}</title></rect>"
                ).format(x, y - 11, width - 0.5, kind, name, duration(length))
            )
            room = int((width - 6) / 5.6)
            if room >= 4:
                short = name if len(name) <= room else f"{name[: room - 1]}…"
                parts.append(
                    Markup('<text x="{:.1f}" y="{}" class="inside">{}</text>').format(
                        x + 3, y + 4, short
                    )
                )
        end = left + inner * us / top
        parts.append(
            Markup('<text x="{:.1f}" y="{}" class="value">{}</text>').format(
                end + 8, y + 4, duration(us)
            )
        )
    return _svg(parts, height, "What one call runs before and after")


def ratio_bar(ratio: float, low: float, high: float, top: float) -> Markup:
    """A speed-up with its 95% interval on an axis from 0 to ``top``; 1.0 is marked."""
    width, height = 110, 18

    def at(value: float) -> float:
        return width * min(max(value, 0.0), top) / top

    kind = "gain" if low > 1 else "loss" if high < 1 else "even"
    inside = Markup(
        '<line x1="{one:.1f}" x2="{one:.1f}" y1="0" y2="18" class="one"/>'
        '<line x1="{low:.1f}" x2="{high:.1f}" y1="9" y2="9" class="whisker {kind}"/>'
        '<circle cx="{mid:.1f}" cy="9" r="4" class="dot {kind}"/>'
    ).format(one=at(1), low=at(low), high=at(high), mid=at(ratio), kind=kind)
    title = f"{times(ratio)} ({low:.2f} to {high:.2f})"
    return Markup(
        '<svg viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" aria-label="{t}">'
        "<title>{t}</title>{inside}</svg>"
    ).format(w=width, h=height, t=title, inside=inside)


def share_bar(share: float, kind: str = "") -> Markup:
    """A thin bar filled to a share between 0 and 1."""
    filled = 100 * min(max(share, 0.0), 1.0)
    return Markup('<span class="meter {}"><i style="width:{:.1f}%"></i></span>').format(
        escape(kind), filled
    )


def breakable(name: str) -> Markup:
    """A dotted name that may break after its dots only."""
    return Markup(".<wbr>").join(name.split("."))


def _axis_top(largest: float) -> float:
    return largest * 1.04 or 1.0


def _grid(top: float, left: int, inner: float, height: float) -> Markup:
    step = _round_step(top / 5)
    lines = []
    value = 0.0
    while value <= top:
        x = left + inner * value / top
        lines.append(
            Markup(
                '<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{h}" class="grid"/>'
                '<text x="{x:.1f}" y="{t}" class="tick">{v}</text>'
            ).format(x=x, h=height, t=height + 15, v="0" if value == 0 else duration(value))
        )
        value += step
    return Markup("").join(lines)


def _round_step(rough: float) -> float:
    size = 1.0
    while size * 10 <= rough:
        size *= 10
    while size > rough:
        size /= 10
    return next(size * m for m in (1, 2, 5, 10) if size * m >= rough)


def _svg(parts: list[Markup], height: float, title: str) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {w} {h}" class="chart" role="img" aria-label="{t}">{body}</svg>'
    ).format(w=_WIDTH, h=height, t=title, body=Markup("").join(parts))
