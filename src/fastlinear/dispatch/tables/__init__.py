"""Shipped measurements, one JSON file a GPU, read once.

A row serves a Problem when everything but its sizes is equal, every size lies within a factor of
two, and the numbers of features are multiples of 16 in both or in neither: rows of any other length
are loaded in other ways. The nearest row (sum of squared log2 distances) wins. Where there is none,
rows of Problems that the family counts as akin serve. A GPU takes rows of one with the same
multiprocessors, as many of them, and other memory, where none of its own are as near.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastlinear.core.device import DeviceFacts, device_facts
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend, family

_FOLDER = Path(__file__).parent
_LARGEST_FACTOR_LOG2 = 1.0
_FEATURES = frozenset({"K", "H", "N"})
_ALIGNED = 16
_BASELINE = "eager"
_SAME_PROCESSOR = {((9, 0), 132): "nvidia-h200"}  # (capability, multiprocessors) → whose table
_DOUBT = 0.1  # lead over the baseline that a winner needs for each doubling away from its row


@dataclass(frozen=True)
class Row:
    """One shipped measurement.

    Attributes:
        problem: the Problem measured.
        best: the winning backend.
        times_us: backend → median microseconds.
        torch: torch version of the measurement.
        sources: backend → hash of its source at the measurement.
        distance: log2 distance from the Problem asked about.
        differs: options of the measured Problem that are not those asked about, as text.
        elsewhere: the device measured, where that is another one of the same processor.
    """

    problem: Problem
    best: str
    times_us: dict[str, float]
    torch: str
    sources: Mapping[str, str]
    distance: float = 0.0
    differs: str = ""
    elsewhere: str = ""

    def story(self) -> str:
        """One sentence for explain."""
        dims = " ".join(f"{k}={v}" for k, v in self.problem.dims)
        where = f"{dims} {self.differs}" if self.differs else dims
        device = f" of an {self.elsewhere}" if self.elsewhere else ""
        story = f"fastest in the shipped measurement{device} at {where} (torch {self.torch})"
        candidates = family(self.problem.family).candidates(self.problem.piece)
        now = {b.name: b.source_hash() for b in candidates if b.name in self.times_us}
        changed = sorted(n for n, digest in now.items() if self.sources.get(n) != digest)
        return f"{story}; {', '.join(changed)} changed since" if changed else story


def shipped(problem: Problem, able: Sequence[Backend]) -> Row | None:
    """The nearest shipped row for this Problem on this device, or None.

    Where a row's winner is not able to serve, the fastest measured backend that is stands in.
    Away from a row's sizes, PyTorch's own path is taken where the winner's lead over it is small.
    """
    measured = _measured_devices(device_facts(problem.device))
    names = {b.name for b in able}
    for view in (_as_it_is, *family(problem.family).akin):
        key, best = _shape_free_key(view(problem)), None
        for slug, elsewhere in measured:
            for row in table(slug, problem.family).get(key, ()):
                times = {name: us for name, us in row.times_us.items() if name in names}
                distance = _distance(row.problem, problem)
                if times and distance is not None and (best is None or distance < best.distance):
                    winner = _winner(row, times, math.sqrt(distance))
                    best = replace(row, best=winner, times_us=times, elsewhere=elsewhere)
                    best = replace(best, distance=distance)
        if best is not None:
            return replace(best, differs=_differing(problem, best.problem))
    return None


def _measured_devices(facts: DeviceFacts) -> list[tuple[str, str]]:
    """The slugs of a device's tables, its own first, and again where it is another device's."""
    akin = _SAME_PROCESSOR.get((facts.capability, facts.units), "") if facts.kind == "cuda" else ""
    return [(facts.slug, ""), *([(akin, akin)] if akin not in ("", facts.slug) else [])]


@lru_cache(maxsize=32)
def table(slug: str, name: str) -> dict[str, tuple[Row, ...]]:
    """All rows of a family shipped for a device, grouped by everything but the sizes, and by every
    view of the family."""
    path = _FOLDER / f"{slug}.json"
    if not path.exists():
        return {}
    data: dict[str, Any] = json.loads(path.read_text())
    grouped: dict[str, list[Row]] = {}
    for item in data["rows"]:
        if item["problem"]["family"] != name:
            continue
        problem = Problem.from_json(item["problem"])
        sources = data.get("sources", {}).get(f"{problem.family}.{problem.piece}", {})
        sources = {**sources, **item.get("sources", {})}
        row = Row(problem, item["best"], dict(item["times_us"]), data["torch"], sources)
        keys = {_shape_free_key(v(problem)) for v in (_as_it_is, *family(problem.family).akin)}
        for key in keys:
            grouped.setdefault(key, []).append(row)
    return {k: tuple(v) for k, v in grouped.items()}


def _winner(row: Row, times: Mapping[str, float], doublings: float) -> str:
    best = row.best if row.best in times else min(times, key=lambda name: times[name])
    own = times.get(_BASELINE)
    if own is not None and own < times[best] * (1.0 + _DOUBT * doublings):
        return _BASELINE
    return best


def _as_it_is(problem: Problem) -> Problem:
    return problem


def _differing(asked: Problem, found: Problem) -> str:
    pairs = zip(asked.options, found.options, strict=True)
    return ", ".join(f"{name}={there}" for (name, here), (_, there) in pairs if here != there)


def _shape_free_key(problem: Problem) -> str:
    names = ",".join(k for k, _ in problem.dims)
    opts = ",".join(f"{k}={v}" for k, v in problem.options)
    return (
        f"{problem.family}|{problem.piece}|{names}|{problem.dtype}|{problem.device}|{opts}"
        f"|{problem.needs_grad}|{problem.precision}|{problem.captured}"
    )


def _distance(a: Problem, b: Problem) -> float | None:
    total = 0.0
    for (name, m), (_, n) in zip(a.dims, b.dims, strict=True):
        if m == 0 or n == 0:
            return None
        if name in _FEATURES and (m % _ALIGNED == 0) != (n % _ALIGNED == 0):
            return None
        step = abs(math.log2(m / n))
        if step > _LARGEST_FACTOR_LOG2:
            return None
        total += step * step
    return total
