"""Configurations of float32 products in three TF32 products, by a model of their time.

Few tiles leave most of the chip idle, and float32 takes long enough that slices of the depth pay
early. What a tile of each configuration takes was measured on an H200 (rows and columns of 16 to
8192, depths of 128 to 4096, 1 to 16 slices): the model's choice is 3% behind the best on average,
17% at worst.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fastlinear.families.linear.triton.gemm_config import UNITS, GemmConfig

_MAX_SLICES = 16
_LEAST_SLICE = 128  # of the depth
_SUM_US = 2.0  # a launch more, which adds slices up
_SUM_BYTES_A_US = 4.0e6
_TURN_US = 1.8  # a launch more, which turns an operand
_TURN_BYTES_A_US = 2.5e6
_ONE_DEPTH = 32  # at a time, where all products add up in one order
_ACCURATE_DEPTH = 1024
"""From here on PyTorch's error is that of blocks of 64 along the depth (1.5e-7) or more; those of
32 have 1.0e-7 to 1.3e-7."""


@dataclass(frozen=True)
class _Tile:
    """A configuration and its times.

    Attributes:
        config: without slices.
        us: microseconds of a multiprocessor for a depth of 1000, of so many programs at once (1, 2
            and so on to as many as it holds).
        base_us: of any launch.
    """

    config: GemmConfig
    us: tuple[float, ...]
    base_us: float


def _tile(r: int, c: int, d: int, warps: int, stages: int, base: float, *us: float) -> _Tile:
    return _Tile(GemmConfig("pointer", r, c, d, warps, stages), us, base)


# Both operands have their depth contiguous: matrix units read them as they lie in shared memory.
_ALONG = (
    _tile(128, 128, 32, 8, 3, 3.0, 47.8),
    _tile(64, 64, 64, 4, 3, 2.5, 19.5, 29.7),
    _tile(64, 64, 32, 4, 3, 2.5, 22.8, 33.0, 40.8, 72.9),
    _tile(32, 128, 32, 4, 3, 2.5, 21.6, 40.8, 62.2),
    _tile(32, 64, 64, 4, 3, 2.5, 12.8, 24.1, 36.7),
    _tile(32, 64, 32, 4, 4, 2.0, 15.0, 26.7, 36.7),
    _tile(16, 64, 64, 4, 3, 2.5, 10.3, 19.5, 33.0),
)
# At least one has not: its numbers are turned on their way through registers.
_ACROSS = (
    _tile(128, 64, 32, 4, 3, 3.0, 52.5, 75.8),
    _tile(64, 64, 32, 4, 3, 2.5, 40.3, 61.4, 84.2, 128.1),
    _tile(64, 64, 32, 4, 4, 2.5, 40.3, 64.7, 88.7),
    _tile(32, 32, 32, 4, 4, 2.0, 22.0, 38.0, 61.0),
)
# Loads element by element take so many registers that larger tiles would spill.
_LOOSE = (
    _tile(64, 64, 32, 4, 4, 2.5, 40.3, 64.7, 88.7),
    _tile(64, 32, 64, 4, 4, 2.0, 25.0, 45.0),
    _tile(32, 32, 32, 4, 4, 2.0, 22.0, 38.0, 61.0),
    _tile(16, 32, 128, 4, 3, 2.5, 15.0, 24.0, 45.0),
)
# Without warpgroup products (before compute capability 9.0) the others spill; times are a guess.
_OLDER = (
    _tile(64, 128, 32, 8, 3, 3.0, 56.0),
    _tile(64, 64, 32, 4, 4, 2.5, 22.8, 31.3, 43.0),
    _tile(32, 32, 32, 4, 4, 2.0, 12.8, 22.8, 36.7),
)


@lru_cache(maxsize=4096)
def config_for(
    rows: int,
    depth: int,
    cols: int,
    capability: tuple[int, int],
    aligned: bool = True,
    along: bool = True,
    one_order: bool = False,
) -> GemmConfig:
    """The configuration of (rows, depth) x (depth, cols), slices of the depth included.

    Args:
        rows, depth, cols: sizes.
        capability: CUDA compute capability.
        aligned: whether both operands and the result have one unit stride and the other a multiple
            of 16 bytes.
        along: whether both operands have their depth contiguous.
        one_order: only those that add up a row's products as the others of them do.
    """
    return _best(rows, depth, cols, capability, aligned, along, one_order)[1]


@lru_cache(maxsize=4096)
def turning_pays(
    rows: int,
    depth: int,
    cols: int,
    capability: tuple[int, int],
    turned: tuple[bool, bool],
) -> bool:
    """Whether to copy the operands for which ``turned`` is true to where their depth is contiguous.

    All are aligned.
    """
    sizes = rows, depth, cols, capability, True
    extra = 0.0
    for numbers, this in zip((rows * depth, depth * cols), turned, strict=True):
        extra += this * (_TURN_US + 8 * numbers / _TURN_BYTES_A_US)
    return _best(*sizes, True)[0] + extra < _best(*sizes, False)[0]


def _best(
    rows: int,
    depth: int,
    cols: int,
    capability: tuple[int, int],
    aligned: bool,
    along: bool,
    one_order: bool = False,
) -> tuple[float, GemmConfig]:
    """Microseconds by the model, and the configuration."""
    units = UNITS.get(capability[0] * 10 + capability[1], 108)
    tiles = (_ALONG if along else _ACROSS) if capability >= (9, 0) else _OLDER
    tiles = tiles if aligned else _LOOSE
    able = [t for t in tiles if t.config.problem(torch.float32, capability) is None]
    accurate = [t for t in able if t.config.block_d <= 32 or depth >= _ACCURATE_DEPTH or not along]
    most = max(1, min(_MAX_SLICES, depth // _LEAST_SLICE))
    if one_order:
        accurate, most = [t for t in able if t.config.block_d == _ONE_DEPTH], 1
        assert accurate, "every table has tiles of that depth"
    found: list[tuple[float, GemmConfig]] = []
    for tile in accurate or able:
        for splits in range(1, most + 1):
            us = _microseconds(tile, splits, rows, depth, cols, units)
            found.append((us, replace(tile.config, splits=splits)))
    return min(found, key=lambda pair: pair[0])


def _microseconds(tile: _Tile, splits: int, rows: int, depth: int, cols: int, units: int) -> float:
    c, us = tile.config, tile.us
    programs = -(-rows // c.block_r) * -(-cols // c.block_c) * splits
    full, rest = divmod(programs, units * len(us))
    waves = full * us[-1] + (us[-(-rest // units) - 1] if rest else 0.0)
    steps = -(-depth // (splits * c.block_d)) * c.block_d
    total = tile.base_us + waves * steps / 1000
    if splits > 1:
        total += _SUM_US + (2 * splits + 1) * 4 * rows * cols / _SUM_BYTES_A_US
    return total
