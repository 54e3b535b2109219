"""Times that beat the measured ceilings: why, as far as a benchmark row tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

_SPREAD = 1.05  # within which ceilings repeat, and copies differ from passes that write less
_CREDIBLE = 1.3  # the most by which a product may beat PyTorch's own large ones
_CREDIBLE_SPLIT = 3.0  # in float32 on a GPU, whose ceiling was once of products without TF32
_CACHED = 64 << 20  # bytes that caches of processors may hold, where a row does not say more

BARE = "it does less than the layer whose least work it is held against"
CACHES = (
    "its bytes come from the processor's caches, where they stay from call to call: the working "
    "set is no larger than the last of them, and the ceiling is of more bytes or of other passes"
)
PERHAPS = (
    "its bytes may come from the processor's caches, whose size the row does not tell: the working "
    "set is small, and the ceiling is of more bytes or of other passes"
)
L2 = "the GPU's L2 cache still holds part of the inputs that take turns"
SPREAD = (
    "the ceiling is a measurement as well, of a pass that reads as much as it writes, and repeats "
    "within a few percent"
)
PRODUCT = "another product is faster than PyTorch's own square ones, which the ceiling is"
NOT_CREDIBLE = (
    "not credible: no product is that much faster than PyTorch's large ones; something else ran "
    "while the ceiling was measured, or the time is wrong: measure again on a quiet machine"
)
WRONG = "the time, the ceiling or the least cost is wrong"


def why_above(row: Mapping[str, Any]) -> str | None:
    """Why a row beats the roofline, in words; None where it does not."""
    place = row.get("roofline")
    if not place or place["fraction"] <= 1.0 or not row.get("median_us"):
        return None
    if "_bare_" in row.get("contender", ""):
        return BARE
    if place["fraction"] <= _SPREAD:
        return SPREAD
    if place["bound"] == "compute":
        return PRODUCT if place["fraction"] <= _most(row) else NOT_CREDIBLE
    moved = place["bytes_per_s"] * row["median_us"] * 1e-6
    env = row.get("env") or {}
    device = env.get("device") or {}
    if device.get("kind") == "cuda":
        held = device.get("l2_bytes") or 0
        return L2 if moved <= held * (1 if row.get("cold_l2") else 2) else WRONG
    cache = env.get("cache_bytes")
    if cache:
        return CACHES if moved <= cache else WRONG
    return PERHAPS if moved <= _CACHED else WRONG


def _most(row: Mapping[str, Any]) -> float:
    """The highest share of the ceiling that a product may reach."""
    kind = (row.get("env") or {}).get("device") or {}
    if kind.get("kind") == "cuda" and (row.get("case") or {}).get("dtype") == "float32":
        return _CREDIBLE_SPLIT
    return _CREDIBLE


def notes_above(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a table of rows says below it of those above 100% of the roofline: nothing where there
    are none, else how many and how far, and a line a reason."""
    found: dict[str, list[float]] = defaultdict(list)
    placed = 0
    for row in rows:
        placed += bool(row.get("roofline"))
        why = why_above(row)
        if why is not None:
            found[why].append(row["roofline"]["fraction"])
    if not found:
        return []
    every = [fraction for fractions in found.values() for fraction in fractions]
    lines = [
        f"above 100% of the measured roofline: {len(every)} of {placed} measurements, up to "
        f"{100 * max(every):.0f}%"
    ]
    bad = (NOT_CREDIBLE, WRONG)
    for why, fractions in sorted(found.items(), key=lambda item: (item[0] in bad, -len(item[1]))):
        lines.append(f"  {len(fractions)} (up to {100 * max(fractions):.0f}%): {why}")
    return lines
