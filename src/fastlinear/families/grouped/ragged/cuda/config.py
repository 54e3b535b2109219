"""Tile configurations of products of ragged groups on Hopper. Touches no device."""

from __future__ import annotations

from functools import cache
from math import ceil

from fastlinear.families.linear.cuda.gemm_config import Config
from fastlinear.kernels.cuda.hopper import BK

ROWS = 128
"""Of a tile: those of the groups' table, TILE_ROWS of ``ragged.h``."""
CANDIDATES: tuple[tuple[Config, float], ...] = (
    (Config(ROWS, 192, 4, cluster=1, out_bufs=3, group_m=16), 0.995),
    (Config(ROWS, 128, 6, cluster=1, out_bufs=2, group_m=16), 0.96),
    (Config(ROWS, 64, 8, cluster=1, group_m=16), 0.72),
)
"""Tiles with their relative rates: those that ``linear_act`` reaches on an H200 with such tiles
(``families/linear/cuda/gemm_config.py``); nobody has timed these kernels."""
_UNHIDDEN = 0.5  # of a tile's time: its first operands and its last epilogue, as of linear_act


def invalid(config: Config) -> str | None:
    """Why the kernel cannot be built with a configuration, or None."""
    if config.bm != ROWS or config.cluster != 1 or not config.pingpong:
        return "tiles are of 128 rows, of one block, and belong to one consumer"
    return config.invalid()


@cache
def rows_config(rows: int, groups: int, n: int, k: int, units: int) -> Config:
    """The tiles of y (rows, n) = x (rows, k) times the groups' weights (n, k): least time in waves.

    Each group that has rows is taken to waste half a tile.

    Args:
        units: multiprocessors.
    """
    served = min(rows, groups)
    tiles_m = max(served, ceil(rows / ROWS + served / 2))
    depth = ceil(k / BK)

    def time(config: Config, rate: float) -> float:
        waves = ceil(tiles_m * ceil(n / config.bn) / units)
        return _time(config, rate, waves * depth, waves)

    return min(CANDIDATES, key=lambda candidate: time(*candidate))[0]


@cache
def depth_config(rows: int, groups: int, m: int, n: int, units: int) -> Config:
    """The tiles of the groups' dW (m, n), each summed over its group's share of all rows."""
    each = max(1, ceil(rows / max(1, min(rows, groups)) / BK))

    def time(config: Config, rate: float) -> float:
        tiles = min(rows, groups) * ceil(m / ROWS) * ceil(n / config.bn)
        waves = ceil(tiles / units)
        return _time(config, rate, waves * each, waves)

    return min(CANDIDATES, key=lambda candidate: time(*candidate))[0]


def _time(config: Config, rate: float, k_tiles: int, tiles: int) -> float:
    """Of one block, in the time of a column of a k-tile: its products, of the last tile half as
    much again, and each tile's stores at least."""
    return (k_tiles + _UNHIDDEN * k_tiles / tiles + tiles) * config.bn / rate
