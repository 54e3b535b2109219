"""How the kernels of layers of unequal sizes are launched: tiles by sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

FORWARD, GRAD_INPUT, GRAD_WEIGHT = range(3)
"""The products, as the kernels number them."""
Sizes = tuple[tuple[int, int, int], ...]
"""(rows, cols, depth) of each group's product."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of 16-bit products.

    Attributes:
        rows, cols: of a tile.
        warps: how many share its rows and its columns.
        stages: steps of 64 numbers along the depth in shared memory at once.
        blocks: a multiprocessor is to hold.
        rate: products in a given time where it is full, against the widest tile's.
    """

    rows: int
    cols: int
    warps: tuple[int, int]
    stages: int
    blocks: int
    rate: float

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps[0] * self.warps[1]

    def shared_bytes(self, derived: bool) -> int:
        """Shared memory of a block: its stages, in which the sums lie afterwards."""
        rows = self.rows * (2 if derived else 1)
        return max(self.stages * (rows + self.cols) * 128, self.rows * (self.cols + 8) * 4)

    def count(self, sizes: Sizes) -> int:
        """Tiles of all groups; one across where there are no columns, for the sums of db."""
        return sum(-(-m // self.rows) * max(1, -(-n // self.cols)) for m, n, _ in sizes)


SMALL = Tiles(64, 64, (2, 2), 4, 3, 0.6)
MIDDLE = Tiles(128, 64, (2, 2), 3, 2, 0.8)
LARGE = Tiles(128, 128, (2, 4), 3, 1, 1.0)
OFFERED = {  # two blocks forward: some bytes are spilt, and a third is gained
    FORWARD: (SMALL, MIDDLE, replace(LARGE, blocks=2)),
    GRAD_INPUT: (SMALL, MIDDLE, LARGE),
    GRAD_WEIGHT: (SMALL, MIDDLE, replace(LARGE, warps=(4, 2))),
}


def tiles_of(sizes: Sizes, units: int, mode: int) -> Tiles:
    """The tiles that are expected to take least on so many multiprocessors: large ones read less,
    small ones fill the chip and waste less at the edges."""
    return min(OFFERED[mode], key=lambda tiles: _time(tiles, sizes, units))


def _time(tiles: Tiles, sizes: Sizes, units: int) -> float:
    area = tiles.rows * tiles.cols
    work = sum(-(-m // tiles.rows) * -(-n // tiles.cols) * area * (k + 64) for m, n, k in sizes)
    full = min(1.0, tiles.count(sizes) / units)
    return work / (tiles.rate * full) if full else 0.0


def largest_first(sizes: Sequence[tuple[int, int, int]], mode: int) -> list[int]:
    """Groups in the order of their tiles' depth: what takes long begins early. Those without
    results are left out; without columns there is still db."""
    given = [g for g, (m, n, _) in enumerate(sizes) if m and (n or mode == GRAD_WEIGHT)]
    return sorted(given, key=lambda g: -sizes[g][2])
