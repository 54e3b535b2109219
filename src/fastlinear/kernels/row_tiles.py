"""How passes over rows of numbers, without a product, are cut into tiles. No Triton import.

Rows that are narrow, or do not begin at multiples of 16 bytes, are read several at once where they
lie behind each other: so many together do begin there, and fill a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

_WIDE_LOAD = 16  # bytes
NUMBERS = 2048  # of a tile: 16 a thread
_BLOCKS = (1024, 512, 256, 128, 64)  # numbers of a tile's row
_FEW = 1 / 8  # of a tile's numbers may be none
_PROGRAMS = 4  # of a multiprocessor, where each walks down several tiles
_FEW_TILES = 4  # that a program walks down while another kernel would be launched
_FEW_ROWS = 256  # up to which a program adds up whole columns: another launch would cost more
_MOST_CHUNKS = 65535  # programs on a grid's second axis


@dataclass(frozen=True)
class RowTiles:
    """The tiles of a pass over (M, N).

    Attributes:
        unit: numbers of which all rows are multiples, or 1: those of a wide load.
        fold: rows of the tensor that are read as one.
        rows, columns: of the tensor so read: M / fold rounded up, and fold N.
        last: numbers of the last such row.
        block_m, block_n: rows and columns of a tile.
    """

    unit: int
    fold: int
    rows: int
    columns: int
    last: int
    block_m: int
    block_n: int

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return -(-self.columns // self.block_n)

    @property
    def down(self) -> int:
        """Tiles below each other."""
        return -(-self.rows // self.block_m)

    @property
    def added(self) -> int:
        """Rows that a program which sums columns adds up itself of each that it reads."""
        return self.fold if self.across == 1 else 1

    @property
    def cut(self) -> bool:
        """Whether the last row has fewer numbers."""
        return self.last < self.columns

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns in units, numbers of the last row: as kernels take them."""
        return self.rows, self.columns // self.unit, self.last

    def chunk_rows(self, units: int) -> int:
        """Rows that a program walks down where it sums columns, for some programs on each of
        ``units`` multiprocessors; all where it adds them up in the time of another launch."""
        if self.down <= _FEW_TILES and self.fold == self.added:
            return self.down * self.block_m
        chunks = max(1, min(self.down, _PROGRAMS * units // self.across, _MOST_CHUNKS))
        return -(-self.down // chunks) * self.block_m

    @property
    def least_chunk(self) -> int:
        """Rows of a program where nothing is summed: one tile's, or what a grid has room for."""
        return -(-self.down // _MOST_CHUNKS) * self.block_m


@lru_cache(maxsize=4096)
def row_tiles(
    m: int, n: int, itemsize: int, dense: bool = True, numbers: int = NUMBERS
) -> RowTiles:
    """Tiles of (m, n), neither 0, that leave few threads without a number.

    Args:
        itemsize: bytes of a number.
        dense: whether all tensors of the pass have their rows behind each other.
        numbers: of a tile.
    """
    at_once = _WIDE_LOAD // itemsize
    fold, block_n = _shape(m, n, at_once, dense)
    rows, columns = -(-m // fold), fold * n
    block_m = max(1, min(numbers // block_n, 1 << (rows - 1).bit_length()))
    last = (m - (rows - 1) * fold) * n
    unit = at_once if columns % at_once == 0 else 1
    return RowTiles(unit, fold, rows, columns, last, block_m, block_n)


def summed_tiles(
    m: int, n: int, itemsize: int, dense: bool, units: int
) -> tuple[RowTiles, int, bool]:
    """As ``row_tiles``, of a pass that sums its columns; rows of a program; whether their sums are
    the columns', so that no other launch adds them up."""
    apart = row_tiles(m, n, itemsize, dense=False)
    if m <= _FEW_ROWS and (apart.unit > 1 or not dense):
        block_m = min(64, 1 << (m - 1).bit_length())
        return replace(apart, block_m=block_m, block_n=32), m, True
    tiles = row_tiles(m, n, itemsize, dense)
    rows = tiles.chunk_rows(units)
    return tiles, rows, rows >= tiles.rows and tiles.fold == tiles.added


def _shape(m: int, n: int, at_once: int, dense: bool) -> tuple[int, int]:
    """Rows read as one, and a tile's columns: wide before those that have every thread busy."""
    least = min(m, at_once // gcd(n, at_once)) if dense else 1
    most = max(least, min(m, _BLOCKS[0] // n)) if dense else 1

    def rank(shape: tuple[int, int]) -> tuple[float, int, float]:
        fold, block = shape
        columns = fold * n
        idle = -(-columns // block) * block / columns - 1
        return max(idle, _FEW), -block, idle

    shapes = [
        (fold, block)
        for fold in range(least, most + 1, least)
        for block in _BLOCKS
        if fold == least or fold * n <= block
    ]
    return min(shapes, key=rank)
