"""How numbers are written on a page. Every function takes None for "not measured"."""

from __future__ import annotations

from typing import Any

NONE = "–"


def duration(us: float | None) -> str:
    """Microseconds as text with three significant digits: 12.3 µs, 4.56 ms, 1.20 s."""
    if us is None:
        return NONE
    size = abs(us)
    if size >= 1e6:
        return f"{three(us / 1e6)} s"
    if size >= 1e3:
        return f"{three(us / 1e3)} ms"
    return f"{three(us)} µs"


def three(value: float | None) -> str:
    """Three significant digits without an exponent for ordinary sizes."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def times(ratio: float | None, digits: int = 2) -> str:
    """A speed-up: 1.62×."""
    return NONE if ratio is None else f"{ratio:.{digits}f}×"


def interval(pair: Any, digits: int = 2) -> str:
    """A 95% interval of a ratio: 1.58 – 1.66."""
    if not pair or None in pair:
        return NONE
    return f"{pair[0]:.{digits}f} – {pair[1]:.{digits}f}"


def error(value: float | None) -> str:
    """A relative error: 2.0e-07; zero as 0."""
    if value is None:
        return "not finite"
    return "0" if value == 0 else f"{value:.1e}"


def percent(share: float | None) -> str:
    """A share of one: 97%."""
    return NONE if share is None else f"{100 * share:.0f}%"


def count(value: float | None) -> str:
    """A large count: 124.4 M."""
    if value is None:
        return NONE
    for limit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f} {name}"
    return f"{value:.0f}"


def problem(data: Any) -> str:
    """Dims and dtype of a Problem: M 512 · K 768 · N 3072 · float32."""
    if not isinstance(data, dict):
        return str(data or "")
    parts = [f"{name} {size}" for name, size in (data.get("dims") or {}).items()]
    if data.get("dtype"):
        parts.append(str(data["dtype"]))
    return " · ".join(parts)


def words(code: str | None) -> str:
    """A code as words: nothing_to_do → nothing to do."""
    return (code or "").replace("_", " ")


def step_of(mode: str) -> str:
    """What one step is in a mode; the optimizer is in none."""
    return "forward and backward" if mode == "train" else "forward"
