"""What there is to gain on a CPU: eager's time over the floor of a chain's products.

The floor is what the products alone take at the rate that was measured of one large product in the
same run: it counts no bias, no activation, no call, and gives every product the rate of the best.
So no implementation of the same products gains more than this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastlinear.bench.case import TIMED
from fastlinear.bench.peer import OURS
from fastlinear.bench.rows import Row
from fastlinear.core.errors import InputError

LEAST_BATCH, LEAST_WIDTH = 64, 256
"""From here on products take the time; below calls do."""


@dataclass(frozen=True)
class Headroom:
    """One cell.

    Attributes:
        layers, batch, width: which.
        direction: ``"forward"`` or ``"forward+backward"``.
        most: eager's time over the floor.
        reached: eager's time over fastlinear's, or None where that was not timed.
    """

    layers: int
    batch: int
    width: int
    direction: str
    most: float
    reached: float | None


def floor_us(row: Row) -> float | None:
    """The floor of the products of a row of eager's on a CPU, from LEAST_BATCH and LEAST_WIDTH on;
    None of any other row, and where moving the tensors takes longer than the products."""
    dims, place = row["case"]["dims"], row["roofline"]
    here = row["contender"] == "eager" and row["case"]["device"] == "cpu" and place is not None
    if not here or dims["M"] < LEAST_BATCH or dims["H"] < LEAST_WIDTH:
        return None
    return float(place["floor_us"]) if place["bound"] == "compute" else None


def headroom(rows: Iterable[Row]) -> list[Headroom]:
    """The cells of rows of experiment ``overhead`` on a CPU, most layers and largest batch first.

    Raises:
        InputError: no timed row of eager in such a cell.
    """
    eager: dict[tuple[int, int, int, str], tuple[float, float]] = {}
    ours: dict[tuple[int, int, int, str], float] = {}
    for row in rows:
        if row["experiment"] != "overhead" or row["metric"] not in TIMED:
            continue
        if row["median_us"] is None:
            continue
        dims = row["case"]["dims"]
        key = (dims["L"], dims["M"], dims["H"], row["direction"])
        floor = floor_us(row)
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
    """A table a direction: what there is to gain, and in brackets what fastlinear gains."""
    cells = headroom(rows)
    parts = []
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
        parts.append(
            f"In {doubled} of {len(own)} cells the floor lies at half of eager's time or less."
        )
    return "\n\n".join(parts)


def _words(cell: Headroom | None) -> str:
    if cell is None:
        return "–"
    reached = "" if cell.reached is None else f" ({cell.reached:.2f})"
    return f"{cell.most:.2f}{reached}"
