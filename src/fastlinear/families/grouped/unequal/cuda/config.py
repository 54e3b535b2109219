"""How the kernels of layers of unequal sizes are launched: tiles and parts of rows, by sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

FORWARD, GRAD_INPUT, GRAD_WEIGHT, ADD = range(4)
"""The products, as the kernels number them, and the sum of shares of the first two."""
STEP = 64
"""Numbers along the depth that a block takes at once; parts of the depth are multiples of it."""
EXTRAS = ("PARTS", "ADDS", "WRITES", "ODD", "EARLY")
"""What a launch may have beside its products, as groups.h describes it."""
Extras = tuple[str, ...]
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

    def shared_bytes(self, derived: bool, odd: bool) -> int:
        """Shared memory of a block: its stages, in which the sums lie afterwards, and where rows
        begin anywhere a chunk for each line of them."""
        lines = self.rows * (2 if derived else 1) + self.cols
        return max(self.stages * lines * (144 if odd else 128), self.rows * (self.cols + 8) * 4)

    def held(self, derived: bool, odd: bool) -> int:
        """Blocks that a multiprocessor holds."""
        return max(1, min(self.blocks, SHARED_BYTES // (self.shared_bytes(derived, odd) + 1024)))

    def count(self, sizes: Sizes) -> int:
        """Tiles of all groups; one across where there are no columns, for the sums of db."""
        return sum(-(-m // self.rows) * max(1, -(-n // self.cols)) for m, n, _ in sizes)


@dataclass(frozen=True)
class SingleTiles(Tiles):
    """Tiles of float32 products.

    Attributes:
        words: numbers along the depth of a stage.
        depth_warps: how many warps share those of a step; their sums are added at the end.
    """

    words: int = 16
    depth_warps: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return super().threads * self.depth_warps

    def shared_bytes(self, derived: bool, odd: bool) -> int:
        """Shared memory of a block: its stages, in which the sums lie afterwards."""
        lines = self.rows * (2 if derived else 1) + self.cols
        stages = self.stages * lines * (self.words + 4)
        return 4 * max(stages, self.depth_warps * self.rows * (self.cols + 4))


@dataclass(frozen=True)
class Choice:
    """How one product of all groups is computed.

    Attributes:
        tiles: what a block computes.
        steps: of 64 numbers of the depth that a block walks at most; None for all.
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
SINGLES = (
    SingleTiles(8, 64, (1, 1), 4, 4, 0.6, words=32, depth_warps=4),
    SingleTiles(16, 64, (1, 1), 4, 3, 0.8, words=32, depth_warps=4),
    SingleTiles(32, 64, (1, 2), 4, 3, 0.9, words=32, depth_warps=2),
    SingleTiles(64, 64, (2, 2), 4, 3, 1.0),
)
"""Tiles of float32 products."""
SINGLE = SINGLES[-1]
PLAIN = (SMALL, MIDDLE, _TWO)
"""Of dx where the derivative is taken already."""
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


# --------------------------------------------------------------------------------------------
# Which is expected to take least. Microseconds on a Hopper GPU, of 132 multiprocessors at 1.7 GHz.

_FULL = 0.75  # a step of a tile of 128 x 128 on a full multiprocessor
_DERIVED = 0.5  # the derivative of 128 rows of it on top
_ALONE = 0.45, 1.2  # a step at least, of any tile
_BLOCK_FULL = 0.6, 2.0  # the first copies and the results of a block, and by its tile's area
_BLOCK_ALONE = 1.5, 2.5
_ODD_FULL = 0.4  # on top where rows begin anywhere: a step of 128 lines
_ODD_ALONE = 0.4, 0.8  # the same alone, by 128 threads; derived as well
_ODD_BLOCK = 4.0  # results of a tile of 128 x 128 alone, by 256 threads
_SHARE_BYTES = 5e6  # of shares a microsecond, written and read again beside the products
_ADDING = 1.0  # of blocks that add shares up
_ADDING_LAUNCH, _ADDING_PART = 2.0, 0.08  # of a launch that adds shares up, and by their number
_SINGLE_FULL = 2.2  # float32: 64 of the depth of a tile of 64 x 64 on a full multiprocessor
_SINGLE_DERIVED = 0.2  # the derivative of 64 rows of it on top
_SINGLE_STEP = 0.3, 1.3  # 64 of the depth at least, and by the tile's area
_SINGLE_BLOCK = 3.0  # the launch, the first copies and the results of a block
_SINGLE_READ, _SINGLE_MOVED = 5e6, 3.8e6  # bytes a microsecond that blocks and memory take
_FULLNESS = 0.1  # of what full multiprocessors would take, on top: rounds are never filled evenly


@lru_cache(maxsize=1024)
def choice_of(sizes: Sizes, units: int, mode: int, derived: bool, odd: bool) -> Choice:
    """The choice that is expected to take least on so many multiprocessors, in 16-bit dtypes: large
    tiles read less, small ones fill the chip and waste less at the edges, parts fill it too but are
    added up.

    Args:
        sizes: of all groups' products.
        units: multiprocessors.
        mode: which product.
        derived: the activation's derivative is taken on the way.
        odd: rows begin anywhere.
    """
    offered: tuple[Tiles, ...] = OFFERED[mode] if derived or mode != GRAD_INPUT else PLAIN
    choices = [Choice(tiles) for tiles in offered]
    if mode == GRAD_WEIGHT:
        most = max((_steps(k) for _, _, k in sizes), default=0)
        lengths = [n for n in _LENGTHS if n < most]
        choices += [Choice(tiles, n) for tiles in offered for n in lengths]
    return min(choices, key=lambda choice: _time(choice, sizes, units, derived, odd))


@lru_cache(maxsize=1024)
def single_choice_of(sizes: Sizes, units: int, mode: int, derived: bool = False) -> Choice:
    """The same in float32, where every product may be divided along its depth."""
    most = max((_steps(k) for _, _, k in sizes), default=0)
    lengths = [None, *(n for n in _LENGTHS if n < most)]
    choices = [Choice(tiles, n) for tiles in reversed(SINGLES) for n in lengths]
    return min(choices, key=lambda choice: single_time(choice, sizes, units, mode, derived))


def single_time(
    choice: Choice, sizes: Sizes, units: int, mode: int, derived: bool = False
) -> float:
    """Microseconds that a float32 product of these sizes is expected to take: the longest of what
    blocks compute, what they read and what memory moves, and behind that the sum of shares."""
    tiles = choice.tiles
    assert isinstance(tiles, SingleTiles)
    area = tiles.rows * tiles.cols / (64 * 64)
    full = _SINGLE_FULL * area / tiles.rate
    full += _SINGLE_DERIVED * tiles.rows / 64 if derived else 0.0
    alone = _SINGLE_STEP[0] + _SINGLE_STEP[1] * area
    groups = [
        (size, alike, choice.parts(size[2]), tiles.count((size,)) * alike * choice.parts(size[2]))
        for size, alike in Counter(sizes).items()
    ]
    all_blocks = sum(count for *_, count in groups)
    beside = min(tiles.held(derived, False), max(1, -(-all_blocks // units)))
    step = max(alone, beside * full)
    blocks: dict[float, int] = {}  # how many take so long
    total = read = moved = shares = last = 0.0
    for (m, n, k), alike, parts, count in groups:
        length = min(-(-_steps(k) // parts), -(-k // tiles.words) * tiles.words / STEP)
        time = _SINGLE_BLOCK + length * step
        blocks[time] = blocks.get(time, 0) + count
        total += count * length * full
        last = max(last, _SINGLE_BLOCK + length * max(alone, full))
        of_a = m * k * (2 if derived else 1)
        read += alike * (of_a * -(-n // tiles.cols) + n * k * -(-m // tiles.rows))
        moved += alike * (of_a + n * k + m * n)
        shares += 2.0 * alike * m * n * parts if parts > 1 else 0.0
    scale, added = 4.0 * 132 / units, 4.0 * shares / _SHARE_BYTES
    if shares:
        added += _ADDING if mode == GRAD_WEIGHT else _ADDING_LAUNCH
        added += _ADDING_PART * max(parts for _, _, parts, _ in groups)
    rounds = _rounds(blocks, units * beside, last)
    memory = scale * max(read / _SINGLE_READ, moved / _SINGLE_MOVED)
    return max(total / units, rounds, memory) + _FULLNESS * total / units + added


def _steps(depth: int) -> int:
    return max(1, -(-depth // STEP))


def _time(choice: Choice, sizes: Sizes, units: int, derived: bool, odd: bool) -> float:
    tiles = choice.tiles
    area = tiles.rows * tiles.cols / (128 * 128)
    full = _FULL * area / tiles.rate + (_DERIVED * tiles.rows / 128 if derived else 0.0)
    alone = _ALONE[derived]
    block = _BLOCK_ALONE[0] + _BLOCK_ALONE[1] * area
    if odd:
        lines = (tiles.rows * (2 if derived else 1) + tiles.cols) / 128
        threads = tiles.threads / 128
        full += _ODD_FULL * lines
        alone += _ODD_ALONE[derived] * lines / threads
        block += _ODD_BLOCK * area * 2 / threads
    counts = [-(-m // tiles.rows) * max(1, -(-n // tiles.cols)) for m, n, _ in sizes]
    parts = [choice.parts(k) for _, _, k in sizes]
    each = [-(-_steps(k) // p) for (_, _, k), p in zip(sizes, parts, strict=True)]
    count = sum(c * p for c, p in zip(counts, parts, strict=True))
    beside = min(tiles.held(derived, odd), max(1, -(-count // units)))  # of a multiprocessor
    step = max(alone, beside * full)
    blocks: dict[float, int] = {}  # how many take so long
    total = shares = 0.0
    for (m, n, _), tiled, split, length in zip(sizes, counts, parts, each, strict=True):
        time = block + length * step
        blocks[time] = blocks.get(time, 0) + tiled * split
        total += tiled * split * (_BLOCK_FULL[0] + _BLOCK_FULL[1] * area + length * full)
        if split > 1:
            shares += 8.0 * m * n * split
    added = shares / _SHARE_BYTES + (_ADDING if shares else 0.0)
    last = block + max(each, default=0) * max(alone, full)
    least = max(total / units, _rounds(blocks, units * beside, last))
    return least + _FULLNESS * total / units + added


def _rounds(blocks: dict[float, int], slots: int, alone: float) -> float:
    """What blocks take at least in so many slots, each after the other, the longest first: where
    there are r slots' worth of blocks and more, a slot has r + 1 of them, of which the last takes
    no more than ``alone``, and counts less where few are left over: they begin where short ones
    end."""
    found, before = 0.0, 0
    for time in sorted(blocks, reverse=True):
        before += blocks[time]
        whole, more = divmod(before, slots)
        last = min(time, alone) * min(1.0, 0.3 + 3.0 * more / slots) if whole else time
        found = max(found, whole * time + (last if more else 0.0))
    return found


def odd_rows(sizes: Sizes, mode: int, pitches: Sequence[Sequence[int]] | None) -> bool:
    """Whether rows of some operand, in 16-bit dtypes, do not begin at 16 bytes."""
    read = {FORWARD: (2,), GRAD_INPUT: (1, 2), GRAD_WEIGHT: (0, 1)}[mode]
    widths = (size[i] for size in sizes for i in read)
    return any(n % 8 for n in widths) or any(n % 8 for pitch in pitches or () for n in pitch)


def largest_first(
    sizes: Sequence[tuple[int, int, int]], mode: int, parts: Sequence[int] | None = None
) -> list[int]:
    """Groups in the order of their blocks' depth: what takes long begins early. Those without
    results are left out; without columns there is still db."""
    given = [g for g, (m, n, _) in enumerate(sizes) if m and (n or mode == GRAD_WEIGHT)]
    if parts is None:
        return sorted(given, key=lambda g: -sizes[g][2])
    return sorted(given, key=lambda g: -sizes[g][2] / parts[g])
