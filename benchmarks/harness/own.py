"""Where one of our own backends, asked for by name, beats what dispatch chose by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastlinear.core.timing import Samples, paired_ratio

OURS = "fastlinear"  # the contender whose backend dispatch chose
_TIMED = ("wall", "device")


@dataclass(frozen=True)
class OwnLoss:
    """One measurement of the default, behind one of our own backends beyond noise.

    Attributes:
        problem, direction, metric: which.
        backend: the fastest of those that are ahead, as a contender: ``"fastlinear[NAME]"``.
        ratio: the default's time over its, the median over rounds.
        low: the low end of that ratio's 95% interval.
        took: what dispatch had chosen for each piece, in words.
    """

    problem: str
    direction: str
    metric: str
    backend: str
    ratio: float
    low: float
    took: str

    def __str__(self) -> str:
        what = f"{self.problem} {self.direction} {self.metric}"
        return f"{what}: {self.ratio:.3f} of {self.backend} (took {self.took})"


def default_behind_own(rows: Iterable[Mapping[str, Any]], by: float = 0.02) -> list[OwnLoss]:
    """Measurements in which our default takes longer by more than ``by`` than one of our backends
    by name, beyond noise (the low end of the paired 95% interval), the worst first."""
    cells: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["metric"] in _TIMED and row.get("valid") and row.get("median_us") is not None:
            cells[(row["problem"], row["direction"], row["metric"])].append(row)
    found = []
    for key, cell in cells.items():
        own = next((r for r in cell if r["contender"] == OURS), None)
        if own is None:
            continue
        ahead = []
        for row in cell:
            if not row["contender"].startswith(f"{OURS}["):
                continue
            ratio, low = _over(own, row)
            if low > 1.0 + by:
                ahead.append((row["median_us"], row["contender"], ratio, low))
        if ahead:
            _, backend, ratio, low = min(ahead)
            took = ", ".join(f"{k}: {v}" for k, v in (own.get("chosen") or {}).items())
            found.append(OwnLoss(*key, backend, ratio, low, took or "it does not say what"))
    return sorted(found, key=lambda loss: -loss.ratio)


def notes_own(losses: list[OwnLoss]) -> list[str]:
    """What a table of rows says below it: how many there are, and a line for each."""
    count = f"{len(losses)} measurement{'' if len(losses) == 1 else 's'}"
    head = "fastlinear's default more than 2% behind a backend of ours, beyond noise, in"
    return [f"{head} {count}", *(f"  {loss}" for loss in losses)]


def _over(own: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    """Time of one row over another's, and the low end of its interval: round by round where both
    have the same rounds, else of the ends of their own intervals."""
    pair = [Samples("", tuple(r.get("samples_us") or ()), r["metric"], 1, "") for r in (own, other)]
    if pair[0].us and len(pair[0].us) == len(pair[1].us):
        ratio = paired_ratio(*pair)
        return ratio.median, ratio.low
    low = (own.get("ci95_us") or [own["median_us"]])[0]
    high = (other.get("ci95_us") or [other["median_us"]])[-1]
    return own["median_us"] / other["median_us"], low / high
