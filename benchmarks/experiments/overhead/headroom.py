"""What there may be to gain on a CPU: eager's time over that of a chain's products alone.

The products are given the best rate that any was measured at in all of the rows: the largest of
their ceilings, PyTorch's own large products, and of what the contenders reach. No bias, activation
or call is counted. That is a measurement of one machine and no proof: a product nobody timed may be
faster, and small ones may never come near.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.harness.case import TIMED
from benchmarks.harness.peer import OURS
from benchmarks.harness.rows import Row
from fastlinear.core.errors import InputError

LEAST_BATCH, LEAST_WIDTH = 64, 256
"""From here on products take the time; below calls do."""


@dataclass(frozen=True)
class Headroom:
    """One cell.

    Attributes:
        layers, batch, width: which.
        direction: ``"forward"`` or ``"forward+backward"``.
        most: eager's time over that of the products alone, at the best measured rate.
        reached: eager's time over fastlinear's, or None where that was not timed.
    """

    layers: int
    batch: int
    width: int
    direction: str
    most: float
    reached: float | None


def best_rates(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """(device name, dtype) → the best rate of products in all these rows of CPUs, in flops per
    second. Contenders that may multiply by Strassen's scheme do fewer than are counted, and take
    no part."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        place = row["roofline"]
        if place is None or row["case"]["device"] != "cpu":
            continue
        found = 0.0 if _multiplies_less(row["contender"]) else place["flops_per_s"]
        if place["bound"] == "compute":
            found = max(found, place["flops_per_s"] / place["fraction"])
        best[_machine(row)] = max(best.get(_machine(row), 0.0), found)
    return best


def _machine(row: Row) -> tuple[str, str]:
    return row["env"]["device"]["name"], row["case"]["dtype"]


def _multiplies_less(contender: str) -> bool:
    return contender == f"{OURS}_fast" or "[strassen" in contender


def floor_us(row: Row, rates: Mapping[tuple[str, str], float]) -> float | None:
    """What the products alone of a row of eager's on a CPU take at the best rate, from LEAST_BATCH
    and LEAST_WIDTH on; None of any other row, and where moving the tensors takes longer."""
    dims, place = row["case"]["dims"], row["roofline"]
    here = row["contender"] == "eager" and row["case"]["device"] == "cpu" and place is not None
    if not here or dims["M"] < LEAST_BATCH or dims["H"] < LEAST_WIDTH:
        return None
    if place["bound"] != "compute" or row["median_us"] is None:
        return None
    return float(place["flops_per_s"] * row["median_us"] / rates[_machine(row)])


def headroom(rows: Iterable[Row]) -> list[Headroom]:
    """The cells of rows of experiment ``overhead`` on a CPU, most layers and largest batch first.

    Raises:
        InputError: no timed row of eager in such a cell.
    """
    eager: dict[tuple[int, int, int, str], tuple[float, float]] = {}
    ours: dict[tuple[int, int, int, str], float] = {}
    known = [row for row in rows if row["experiment"] == "overhead"]
    rates = best_rates(known)
    for row in known:
        if row["metric"] not in TIMED:
            continue
        if row["median_us"] is None:
            continue
        dims = row["case"]["dims"]
        key = (dims["L"], dims["M"], dims["H"], row["direction"])
        floor = floor_us(row, rates)
        if floor is not None:
            eager[key] = row["median_us"], floor
        elif row["contender"] == OURS:
            ours[key] = row["median_us"]
    if not eager:
        raise InputError(
            "bench.headroom",
            f"rows of eager on a CPU, batch {LEAST_BATCH} and width {LEAST_WIDTH} or more",
            "none",
            "Run `fastlinear bench overhead --device cpu --out FILE`.",
        )
    found = []
    for key, (us, floor) in eager.items():
        layers, batch, width, direction = key
        reached = us / ours[key] if key in ours else None
        found.append(Headroom(layers, batch, width, direction, us / floor, reached))
    return sorted(found, key=lambda h: (h.direction, -h.layers, -h.batch, h.width))


def markdown(rows: Iterable[Row]) -> str:
    """A table a direction: what there may be to gain, and in brackets what fastlinear gains."""
    known = list(rows)
    cells = headroom(known)
    listed = sorted(best_rates(r for r in known if r["experiment"] == "overhead").items())
    said = ", ".join(f"{rate / 1e9:.0f} GFLOP/s ({dtype})" for (_, dtype), rate in listed)
    parts = [f"Best rate of a product in these rows: {said}."]
    for direction in dict.fromkeys(c.direction for c in cells):
        own = [c for c in cells if c.direction == direction]
        widths = sorted({c.width for c in own})
        by_place = {(c.layers, c.batch, c.width): c for c in own}
        lines = [
            f"| {direction}: layers, batch | {' | '.join(map(str, widths))} |",
            "|---" * (len(widths) + 1) + "|",
        ]
        for n, m in dict.fromkeys((c.layers, c.batch) for c in own):
            found = (_words(by_place.get((n, m, w))) for w in widths)
            lines.append(f"| {n}, {m} | {' | '.join(found)} |")
        doubled = sum(c.most >= 2 for c in own)
        parts.append("\n".join(lines))
        half = "the products alone take half of eager's time or less"
        parts.append(f"In {doubled} of {len(own)} cells {half}.")
    return "\n\n".join(parts)


def _words(cell: Headroom | None) -> str:
    if cell is None:
        return "–"
    reached = "" if cell.reached is None else f" ({cell.reached:.2f})"
    return f"{cell.most:.2f}{reached}"
