"""What the rows of the suite say together, and as tables."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.peer import OURS
from benchmarks.suite.measure import MEASURED
from fastlinear.core.timing import Samples, paired_ratio

Row = dict[str, Any]
BEHIND = 0.02
"""What a ratio must pass beyond its 95% interval to count as behind."""
WITHIN = (0.7, 1.4)
"""Predicted over measured gain that counts as well predicted."""
TRANSFORMERS = "transformers"
COLUMNS = (
    *("family", "mode", "linears", ">untraced", "best peer", ">peer ms", ">ours ms"),
    *(">of peer", "right", ">predicted", ">seconds"),
)
KIND_COLUMNS = ("kind", "mode", ">families", ">over eager", ">over best peer", ">rewritten alone")


def behind(row: Row) -> bool:
    """Whether ours is behind the best peer, beyond noise and 2%."""
    return row["ratio_ci95"] is not None and row["ratio_ci95"][0] > 1.0 + BEHIND


def share(row: Row) -> float | None:
    """The share of a row's linear flops; None where there are none."""
    return _part(row, row["flops"].get("untraced", 0.0))


def callers_share(row: Row) -> float | None:
    """The share of linear flops that forwards hold which cannot be traced."""
    return _part(row, sum(one["flops"] for one in row["callers"]))


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of all rows.

    Means over families of transformers are ``out_of_reach``, the share of linear flops that ended
    as "cannot be traced", ``callers``, of those in forwards that cannot be traced, whatever became
    of them, and ``not_followed``, of products by parameters that are no linear's.
    """
    timed = [r for r in rows if r["ratio_to_best"] is not None]
    known = [r for r in rows if r["needs"] == TRANSFORMERS]
    ratios = [x for r in rows for x in r["calibration"]]
    low, high = WITHIN
    return {
        "rows": len(rows),
        "status": dict(Counter(r["status"] for r in rows)),
        "timed": len(timed),
        "behind": sum(map(behind, timed)),
        "over_best_peer": _geomean(1 / r["ratio_to_best"] for r in timed),
        "out_of_reach": _mean(map(share, known)),
        "callers": _mean(map(callers_share, known)),
        "not_followed": _mean(map(_not_followed, known)),
        "kept": sum(r["outcomes"].get("kept", 0) for r in rows),
        "calibrated": sum(low <= x <= high for x in ratios),
        "predicted": len(ratios),
        "wrong": sum(r["verified"] is False for r in rows),
    }


def by_kind(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Geometric means by kind and mode, as lines under ``KIND_COLUMNS``."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["ratio_to_best"] is not None:
            groups.setdefault((row["kind"], row["mode"]), []).append(row)
    lines = []
    for (kind, mode), some in groups.items():
        alone = [_ratio(r, OURS, "eager") for r in some]
        figures = (
            _geomean(1 / r["ratio_to_eager"] for r in some),
            _geomean(1 / r["ratio_to_best"] for r in some),
            _geomean(1 / x for x in alone if x is not None),
        )
        lines.append((kind, mode, str(len(some)), *map(_number, figures)))
    return lines


def lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """A line a row under ``COLUMNS``."""
    return [_line(row) for row in rows]


def _line(row: Row) -> tuple[str, ...]:
    first = row["family"], row["mode"]
    seconds = f"{row['seconds'].get('total', sum(row['seconds'].values())):.0f}"
    if row["status"] != MEASURED:
        why = f"{row['status']}: {row['error']['message'][:60]}"
        return (*first, why, *("-",) * 7, seconds)
    found = ", ".join(f"{count} {name}" for name, count in row["outcomes"].items())
    part = share(row)
    best, own = row["best_peer"], row["ours"]
    times = [_number(_ms(row, name)) for name in (best, own)]
    ratio = _number(row["ratio_to_best"]) + (" behind" if behind(row) else "")
    right = "-" if row["verified"] is None else "yes" if row["verified"] else "WRONG"
    predicted = _number(_geomean(row["calibration"]))
    untraced = "-" if part is None else f"{100 * part:.0f}%"
    return (
        *(*first, found or "none", untraced, best or "-", *times, ratio),
        *(right, predicted, seconds),
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """What is said below the tables: the figures, who is behind, wrong, or has failed, and why
    linears cannot be traced."""
    told = summary(rows)
    low, high = WITHIN
    said = [
        f"{told['behind']} of {told['timed']} behind the best peer by more than 2%, beyond noise; "
        f"{_number(told['over_best_peer'])} times as fast as it (geometric mean)",
        f"{told['kept']} linears kept; predicted over measured gain within {low} to {high} for "
        f"{told['calibrated']} of {told['predicted']}",
        f"{told['wrong']} with wrong results; "
        + ", ".join(f"{count} {status}" for status, count in told["status"].items()),
    ]
    if told["out_of_reach"] is not None:
        said.append(
            f"families of transformers: {_percent(told['out_of_reach'])} of linear flops ended as "
            f"cannot be traced, {_percent(told['callers'])} lie in forwards that cannot be; "
            f"{_percent(told['not_followed'])} of flops by parameters are no linear's"
        )
    for row in rows:
        name = f"{row['family']}, {row['mode']}"
        if behind(row):
            said.append(f"behind: {name}: {row['ratio_to_best']:.3f} of {row['best_peer']}")
        said += [f"wrong: {name}: {text}" for text in row["wrong"]]
        if row["status"] not in (MEASURED, "skipped"):
            error = row["error"]
            said.append(f"{row['status']}: {name}: {error['stage']}: {error['message']}")
    return said + _untraced(rows)


def _untraced(rows: Iterable[Row]) -> list[str]:
    """Why forwards cannot be traced, and whose, by the shares of their families' linear flops."""
    found: dict[str, tuple[float, list[str]]] = {}
    for row in rows:
        for one in row["callers"]:
            part = _part(row, one["flops"]) or 0.0
            reason = _alike(one["reason"])
            total, names = found.setdefault(reason, (0.0, []))
            told = f"{row['family']}, {row['mode']} ({_percent(part)})"
            found[reason] = total + part, [*names, told]
    worst = sorted(found.items(), key=lambda item: -item[1][0])
    return [f"cannot be traced: {'; '.join(names)}: {reason}" for reason, (_, names) in worst]


def _ratio(row: Row, own: str, other: str) -> float | None:
    arms = row["arms"]
    if own not in arms or other not in arms:
        return None
    first, second = (Samples(n, tuple(arms[n]["samples_us"]), "wall", 1, "") for n in (own, other))
    return paired_ratio(first, second).median


def _alike(reason: str) -> str:
    """The same words for the same reason, whichever class and line it is about."""
    reason = re.sub(r"^\w+\.forward", "its forward", reason)
    return re.sub(r" \(line \d+[^)]*\)", "", reason)


def _part(row: Row, flops: float) -> float | None:
    whole = row["flops"].get("linear")
    return flops / whole if whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def _not_followed(row: Row) -> float | None:
    flops = row["flops"]
    whole = flops.get("linear", 0.0) + flops.get("not_followed", 0.0)
    return flops["not_followed"] / whole if whole else None


def _ms(row: Row, name: str | None) -> float | None:
    return None if name is None else row["arms"][name]["us"] / 1e3


def _geomean(values: Iterable[float]) -> float | None:
    known = [math.log(v) for v in values]
    return math.exp(sum(known) / len(known)) if known else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
