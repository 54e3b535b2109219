"""Tile configurations of products of ragged groups on Hopper. Touches no device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from typing import NamedTuple

from fastlinear.families.linear.cuda.gemm_config import Config
from fastlinear.kernels.cuda.hopper import BK, SHARED_LIMIT

ROWS = 128
"""Of a tile: those of the groups' table, TILE_ROWS of ``ragged.h``."""
CANDIDATES: tuple[tuple[Config, float], ...] = (
    (Config(ROWS, 192, 4, cluster=1, out_bufs=3, group_m=16), 0.995),
    (Config(ROWS, 128, 6, cluster=1, out_bufs=2, group_m=16), 0.96),
    (Config(ROWS, 64, 8, cluster=1, group_m=16), 0.72),
)
"""Tiles with their relative rates: those that ``linear_act`` reaches on an H200 with such tiles
(``families/linear/cuda/gemm_config.py``)."""
_UNHIDDEN = 0.5  # of a tile's time: its first operands and its last epilogue, as of linear_act


_MOST_KEPT = 1024  # whose two numbers are 8 KiB


def kept(config: Config, groups: int) -> int:
    """Groups, at most, of which shared memory keeps where they lie beside the operands; 0 where
    there are more."""
    most = min(_MOST_KEPT, (SHARED_LIMIT - config.shared_bytes) // 8 - 1)
    return most if groups <= most else 0


def shared_bytes(config: Config, groups: int) -> int:
    """Of a launch."""
    most = kept(config, groups)
    return config.shared_bytes + 8 * (most + 1) * (most > 0)


def invalid(config: Config) -> str | None:
    """Why the kernel cannot be built with a configuration, or None."""
    if config.bm != ROWS or config.cluster != 1 or not config.pingpong:
        return "tiles are of 128 rows, of one block, and belong to one consumer"
    return config.invalid()


class Tiled(NamedTuple):
    """How a product is tiled.

    Attributes:
        config: of its tiles.
        time: of the slowest block, in the time of one column of a k-tile.
    """

    config: Config
    time: float


@cache
def rows_tiles(rows: int, groups: int, n: int, k: int, units: int) -> Tiled:
    """The tiles of y (rows, n) = x (rows, k) times the groups' weights (n, k): least time in waves.

    Each group that has rows is taken to waste half a tile.

    Args:
        units: multiprocessors.
    """
    served = min(rows, groups)
    tiles_m = max(served, ceil(rows / ROWS + served / 2))
    return _quickest(lambda bn: tiles_m * ceil(n / bn), ceil(k / BK), units)


@cache
def depth_tiles(rows: int, groups: int, m: int, n: int, units: int) -> Tiled:
    """The tiles of the groups' dW (m, n), each summed over its group's share of all rows."""
    served = max(1, min(rows, groups))
    each = max(1, ceil(rows / served / BK))
    return _quickest(lambda bn: served * ceil(m / ROWS) * ceil(n / bn), each, units)


def _quickest(tiles: Callable[[int], int], depth: int, units: int) -> Tiled:
    """Of so many tiles by their width, of so many k-tiles."""

    def tiled(config: Config, rate: float) -> Tiled:
        waves = ceil(tiles(config.bn) / units)
        return Tiled(config, _time(config, rate, waves * depth, waves))

    return min((tiled(*candidate) for candidate in CANDIDATES), key=lambda found: found.time)


def _time(config: Config, rate: float, k_tiles: int, tiles: int) -> float:
    """Of one block, in the time of a column of a k-tile: its products, of the last tile half as
    much again, and each tile's stores at least."""
    return (k_tiles + _UNHIDDEN * k_tiles / tiles + tiles) * config.bn / rate
