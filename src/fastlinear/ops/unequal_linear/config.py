"""How the kernels of layers of unequal sizes are launched: tiles and parts of rows, by sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

FORWARD, GRAD_INPUT, GRAD_WEIGHT = range(3)
"""The products, as the kernels number them."""
STEP = 64
"""Numbers along the depth that a block takes at once; parts of the depth are multiples of it."""
Sizes = tuple[tuple[int, int, int], ...]
"""(rows, cols, depth) of each group's product."""
SHARED_BYTES = 232448 - 1024
"""Of a multiprocessor, less what a block takes."""


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
        """Shared memory of a block: its stages, in which the sums lie afterwards, and a word for
        each line of them."""
        lines = self.rows * (2 if derived else 1) + self.cols
        return max(self.stages * lines * (128 + 4), self.rows * (self.cols + 8) * 4)

    def held(self, derived: bool) -> int:
        """Blocks that a multiprocessor holds."""
        return max(1, min(self.blocks, SHARED_BYTES // (self.shared_bytes(derived) + 1024)))

    def count(self, sizes: Sizes) -> int:
        """Tiles of all groups; one across where there are no columns, for the sums of db."""
        return sum(-(-m // self.rows) * max(1, -(-n // self.cols)) for m, n, _ in sizes)


@dataclass(frozen=True)
class Choice:
    """How one product of all groups is computed.

    Attributes:
        tiles: what a block computes.
        steps: of 64 rows that a block of dW walks at most; None for all.
    """

    tiles: Tiles
    steps: int | None = None

    def parts(self, depth: int) -> int:
        """How many blocks share a tile's depth; none is left without."""
        whole = _steps(depth)
        if self.steps is None:
            return 1
        each = -(-whole // -(-whole // self.steps))
        return -(-whole // each)


SMALL = Tiles(64, 64, (2, 2), 4, 3, 0.6)
MIDDLE = Tiles(128, 64, (2, 2), 3, 2, 0.8)
LARGE = Tiles(128, 128, (2, 4), 3, 1, 1.0)
_TWO = replace(LARGE, blocks=2)  # some bytes are spilt, and a third is gained
OFFERED = {
    FORWARD: (SMALL, MIDDLE, _TWO),
    GRAD_INPUT: (SMALL, MIDDLE, LARGE),  # where the derivative is not taken yet
    GRAD_WEIGHT: (
        replace(SMALL, stages=3),
        replace(MIDDLE, stages=2),
        replace(LARGE, warps=(4, 2)),
    ),
}
SINGLE = Tiles(64, 64, (2, 2), 1, 2, 1.0)
"""What single.cu is written for."""
PLAIN = (SMALL, MIDDLE, _TWO)
"""Of dx where the derivative is taken already."""
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


# --------------------------------------------------------------------------------------------
# Which is expected to take least. Microseconds on a Hopper GPU, of 132 multiprocessors at 1.7 GHz.

_FULL = 0.75, 1.15  # a step of a tile of 128 x 128 on a full multiprocessor; derived as well
_ALONE = 0.45, 0.7  # a step at least, of any tile
_SINGLE_FULL, _SINGLE_ALONE = 2.6, 5.0  # 64 numbers along the depth in float32
_BLOCK_FULL = 0.6, 2.0  # the first copies and the results of a block, and by its tile's area
_BLOCK_ALONE = 3.0, 1.0
_SHARE_BYTES = 5e6  # of shares a microsecond, written and read again beside the products
_LAUNCH = 1.0  # of blocks that add shares up
_FULLNESS = 0.1  # of what full multiprocessors would take, on top: rounds are never filled evenly


@lru_cache(maxsize=1024)
def choice_of(sizes: Sizes, units: int, mode: int, derived: bool, single: bool = False) -> Choice:
    """The choice that is expected to take least on so many multiprocessors: large tiles read less,
    small ones fill the chip and waste less at the edges, parts fill it too but are added up.

    Args:
        sizes: of all groups' products.
        units: multiprocessors.
        mode: which product.
        derived: the activation's derivative is taken on the way.
        single: in float32.
    """
    offered: tuple[Tiles, ...] = OFFERED[mode] if derived or mode != GRAD_INPUT else PLAIN
    if single:
        offered = (SINGLE,)
    choices = [Choice(tiles) for tiles in offered]
    if mode == GRAD_WEIGHT:
        most = max((_steps(k) for _, _, k in sizes), default=0)
        lengths = [n for n in _LENGTHS if n < most]
        choices += [Choice(tiles, n) for tiles in offered for n in lengths]
    return min(choices, key=lambda choice: _time(choice, sizes, units, derived, single))


def _steps(depth: int) -> int:
    return max(1, -(-depth // STEP))


def _time(choice: Choice, sizes: Sizes, units: int, derived: bool, single: bool) -> float:
    tiles = choice.tiles
    area = tiles.rows * tiles.cols / (128 * 128)
    held = tiles.held(derived) if not single else tiles.blocks
    if single:
        full, alone = _SINGLE_FULL, _SINGLE_ALONE
    else:
        full = _FULL[derived] * area / tiles.rate
        alone = _ALONE[derived]
    counts = [-(-m // tiles.rows) * max(1, -(-n // tiles.cols)) for m, n, _ in sizes]
    parts = [choice.parts(k) for _, _, k in sizes]
    each = [-(-_steps(k) // p) for (_, _, k), p in zip(sizes, parts, strict=True)]
    count = sum(c * p for c, p in zip(counts, parts, strict=True))
    beside = min(held, max(1, -(-count // units)))  # blocks of a multiprocessor, in fact
    step = max(alone, beside * full)
    blocks: dict[float, int] = {}  # how many take so long
    total = shares = 0.0
    for (m, n, _), tiled, split, length in zip(sizes, counts, parts, each, strict=True):
        time = _BLOCK_ALONE[0] + _BLOCK_ALONE[1] * area + length * step
        blocks[time] = blocks.get(time, 0) + tiled * split
        total += tiled * split * (_BLOCK_FULL[0] + _BLOCK_FULL[1] * area + length * full)
        if split > 1:
            shares += 8.0 * m * n * split
    added = shares / _SHARE_BYTES + (_LAUNCH if shares else 0.0)
    least = max(total / units, _rounds(blocks, units * beside))
    return least + _FULLNESS * total / units + added


def _rounds(blocks: dict[float, int], slots: int) -> float:
    """What blocks take at least in so many slots, each after the other, the longest first: where
    there are r slots' worth of blocks and one more, a slot has r + 1 of them."""
    found, before = 0.0, 0
    for time in sorted(blocks, reverse=True):
        before += blocks[time]
        found = max(found, -(-before // slots) * time)
    return found


def largest_first(
    sizes: Sequence[tuple[int, int, int]], mode: int, parts: Sequence[int] | None = None
) -> list[int]:
    """Groups in the order of their blocks' depth: what takes long begins early. Those without
    results are left out; without columns there is still db."""
    given = [g for g, (m, n, _) in enumerate(sizes) if m and (n or mode == GRAD_WEIGHT)]
    if parts is None:
        return sorted(given, key=lambda g: -sizes[g][2])
    return sorted(given, key=lambda g: -sizes[g][2] / parts[g])
