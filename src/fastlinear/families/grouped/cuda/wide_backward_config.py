"""How wide_backward.cu is launched: tiles in shared memory, chunks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fastlinear.families.grouped.cuda.group_map import COLUMNS, TOKENS, by_words, padded
from fastlinear.families.grouped.reference import Needs
from fastlinear.kernels.cuda.hopper import SHARED_LIMIT

_HALF = 128  # of the K features, those of one block
_BOX = TOKENS * COLUMNS * 2  # bytes
_LEAST, _MOST = 128, 256  # features
_BARRIERS = 256  # bytes, room for all
_MOST_TILES, _MOST_OUTS = 4, 2
_HELD, _HELD_BESIDE_ALL = 3, 2  # boxes of W in registers; beside dW of 4 boxes
_MOST_CHUNKS = 64
# Estimates in tiles of one block, which takes about 2 us for one: what it does before and after its
# tiles, and what the sums' launch costs beside its traffic.
_START, _LAUNCH = 3.0, 1.0
_SHARES_BYTES = 10e6  # of shares, written and read, in the time of a tile


@dataclass(frozen=True)
class WideBackwardConfig:
    """One way to launch the kernel.

    Attributes:
        tiles: of dy and x in shared memory.
        saved: half tiles of what the forward saved there; with ``split`` a tile is one of them.
        outs: tiles of dx there.
        held: boxes of W in registers; the others are in shared memory.
        cluster: whether the two blocks of more than 128 features share what both read.
        split: whether each of these grades half of a tile, rather than all of it.
    """

    tiles: int
    saved: int = 3
    outs: int = 1
    held: int = 2
    cluster: bool = True
    split: bool = False


def halves(k: int) -> int:
    """Blocks that share a tile of K features."""
    return -(-k // _HALF)


def serves(k: int, n: int) -> bool:
    """Whether the kernel takes groups of such sizes: even, more than 128 features."""
    return k % 2 == 0 and n % 2 == 0 and _LEAST < max(k, n) <= _MOST


def has_words(k: int, n: int, order: str, needs: Needs) -> bool:
    """Whether dy or x, where that is read, comes by words."""
    return by_words(n, order) or (by_words(k, order) and needs[1])


def shared_bytes(config: WideBackwardConfig, n: int, saved: bool, needs: Needs) -> int:
    """Dynamic shared memory of a block."""
    dy = padded(n) // COLUMNS * _BOX
    x = 2 * _BOX if needs[1] else 0
    out = 2 * _BOX * config.outs if needs[0] else 0
    sums = (2 if config.cluster else 1) * dact_warps(n) * COLUMNS * 4 if needs[2] else 0
    weights = 2 * _BOX * (padded(n) // COLUMNS - config.held) if needs[0] else 0
    kept = config.saved * dy // 2 if saved else 0
    return config.tiles * (dy + x) + kept + out + weights + sums + _BARRIERS


def dact_warps(n: int) -> int:
    """Warps that grade: a box each, or a half of one."""
    boxes = padded(n) // COLUMNS
    return boxes if boxes > 2 else 2 * boxes


def fits(config: WideBackwardConfig, n: int, saved: bool, needs: Needs) -> bool:
    """Whether a block's shared memory holds that."""
    return shared_bytes(config, n, saved, needs) <= SHARED_LIMIT


@lru_cache(maxsize=1024)
def wide_backward_config(
    k: int,
    n: int,
    saved: bool = True,
    needs: Needs = (True, True, True),
    sign_mask: bool = False,
    words: bool = False,
) -> WideBackwardConfig | None:
    """The configuration for groups of such sizes: as many tiles as shared memory holds.

    Args:
        k, n: their features.
        saved: whether numbers were saved.
        needs: which gradients are wanted.
        sign_mask: whether signs were saved.
        words: whether there is something that dact warps bring in, see ``has_words``.
    """
    if not serves(k, n):
        return None
    cluster = halves(k) == 2
    boxes = padded(n) // COLUMNS
    held = _HELD_BESIDE_ALL if needs[1] and boxes > _HELD else boxes
    for tiles in range(_MOST_TILES, 1, -1):
        for kept in (4, 3, 2) if saved else (1,):
            for outs in (_MOST_OUTS, 1):
                config = WideBackwardConfig(
                    tiles, kept, outs, held, cluster, cluster and (saved or sign_mask or words)
                )
                if fits(config, n, saved, needs):
                    return config
    return None


@lru_cache(maxsize=1024)
def chunks_of(m: int, groups: int, k: int, n: int, units: int, shares: bool) -> int:
    """Into how many chunks a group's tokens are cut: what all blocks take, one behind the other on
    each multiprocessor, and their shares of the sums."""
    tiles, at_once = -(-m // TOKENS), max(1, units // halves(k))

    def cost(chunks: int) -> float:
        waves = -(-groups * chunks // at_once)
        sums = _LAUNCH + chunks * groups * n * k * 4 / _SHARES_BYTES * 2
        return waves * (-(-tiles // chunks) + _START) + (sums if shares and chunks > 1 else 0)

    return min(range(1, min(tiles, _MOST_CHUNKS) + 1), key=cost)
