"""How weight_stationary.cu is launched: a group's weight in shared memory, blocks, tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fastlinear.families.grouped.cuda.group_map import COLUMNS, TOKENS, padded
from fastlinear.kernels.cuda.hopper import SHARED_LIMIT

_BOX = TOKENS * COLUMNS * 2  # bytes
_ROW = COLUMNS * 2  # bytes of a box's row
_WARPS, _WARP_BOX = 8, 16 * COLUMNS * 2
_BARRIERS = 256  # bytes, room for all
_LEAST, _MOST_OUTPUTS = COLUMNS, 256  # features; outputs of a part
_MOST_WEIGHT = 128 * 1024  # bytes of a part's weight
_MOST_PARTS = 4
_LEAST_STAGES, _MOST_STAGES, _MOST_OUTS = 4, 12, 4
_GOOD = 0.9  # of the multiprocessors are busy


@dataclass(frozen=True)
class StationaryConfig:
    """One way to launch the kernel.

    Attributes:
        outputs: of a group that a block makes at a time, a multiple of 64 up to 256: a part.
        stages: boxes of x in shared memory.
        outs: boxes of results there, for each warp.
        weights: parts' weights there.
    """

    outputs: int
    stages: int
    outs: int
    weights: int = 1


def serves(k: int, n: int) -> bool:
    """Whether the kernel takes groups of such sizes: even, a weight that fits."""
    return stationary_config(k, n) is not None


def shared_bytes(config: StationaryConfig, k: int) -> int:
    """Dynamic shared memory of a block."""
    weight = padded(k) // COLUMNS * config.outputs * _ROW
    out = _WARPS * _WARP_BOX * config.outs
    return config.weights * weight + config.stages * _BOX + out + _BARRIERS


@lru_cache(maxsize=1024)
def stationary_config(k: int, n: int) -> StationaryConfig | None:
    """The configuration for groups of such sizes, or None."""
    if k % 2 or n % 2 or min(k, n) < _LEAST:
        return None
    most = min(_MOST_OUTPUTS, _MOST_WEIGHT // (padded(k) * 2) // COLUMNS * COLUMNS)
    if most == 0 or n > _MOST_PARTS * most:
        return None
    parts = -(-n // most)
    outputs = padded(-(-n // parts))
    for weights, outs, stages in ((2, _MOST_OUTS, 8), (1, _MOST_OUTS, 8), (1, 3, _LEAST_STAGES)):
        config = StationaryConfig(outputs, stages, outs, weights)
        spare = SHARED_LIMIT - shared_bytes(config, k)
        if spare >= 0:
            more = min(_MOST_STAGES - stages, spare // _BOX)
            return StationaryConfig(outputs, stages + more, outs, weights)
    return None


def blocks_of(parts: int, tiles: int, units: int) -> tuple[int, int]:
    """Blocks for so many parts of so many tiles, and how many of them share a part, walking
    through it together; 0: each takes a stretch of all parts' tiles."""
    lanes = min(tiles, units // parts)
    if lanes == tiles or parts * lanes >= _GOOD * units:
        return parts * lanes, lanes
    return min(units, parts * tiles), 0
