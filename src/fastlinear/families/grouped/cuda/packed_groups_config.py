"""How packed_groups.cu is launched: strips, warps, stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fastlinear.families.grouped.cuda.packed_groups_tiles import (
    OVERHEAD,
    SECTOR,
    SERVICE_REGISTERS,
    SIZE,
    holds,
    launch_registers,
    sign_bytes,
    tile_bytes,
    weight_bytes,
    window,
)

_OTHER_REGISTERS = 35  # of a thread: fragments, addresses, counters
_WEIGHT_REGISTERS = 112
_GOOD_WARPS, _MOST_WARPS = 8, 14
_MOST_STRIP = 512  # bytes
_STAGES = ((4, 4), (3, 5), (3, 4), (3, 3), (3, 2), (2, 2), (2, 1))
_FIRST = (  # groups of a strip, warps of a group, blocks, numbers of a row of x and y, stages
    (8, 1, 2, 340, ((4, 4),)),
    (8, 1, 1, 512, ((4, 4),)),
    (4, 1, 3, 288, ((4, 4),)),
    (4, 1, 2, 512, ((4, 4), (3, 4), (3, 3))),
    (2, 2, 3, 256, ((4, 4), (3, 4))),
    (2, 4, 2, 400, ((3, 4), (3, 3), (3, 2))),
    (2, 5, 1, 402, ((4, 4), (3, 4))),
    (1, 4, 3, 200, ((4, 4),)),
    (1, 4, 2, 256, ((4, 4), (3, 4), (3, 3))),
)
"""What is taken first where it fits. H200, 16 to 128 features, 96 groups, 30 million numbers, all
ways of which two stages fit, while developing: about 2% behind the fastest of each size, what was
chosen before these 5%."""


@dataclass(frozen=True)
class PackedConfig:
    """One way to launch the kernel.

    Attributes:
        groups: groups of a strip, or tokens of a group where groups come first.
        parts: warps that share the outputs of a group.
        stages, outs: tiles of x and of y in shared memory.
        blocks: blocks of a multiprocessor.
        staged: bytes of shared memory through which a strip's weights come, 0: none.
        mixed: whether both blocks of 16 rows of a tile are computed at a time.
    """

    groups: int
    parts: int
    stages: int = 3
    outs: int = 4
    blocks: int = 1
    staged: int = 0
    mixed: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.groups * self.parts + service_warps(self))


def shared_bytes(
    config: PackedConfig, k: int, n: int, save_pre: bool, sign_mask: bool = False
) -> int:
    """Dynamic shared memory of a block."""
    x, y = (tile_bytes(config.groups * width) for width in (k, n))
    room = OVERHEAD + config.staged + config.stages * x + config.outs * y * (2 if save_pre else 1)
    return room + (config.outs * sign_bytes(config.groups * n) if sign_mask else 0)


def fits(config: PackedConfig, k: int, n: int, save_pre: bool, sign_mask: bool = False) -> bool:
    """Whether a multiprocessor's shared memory holds its blocks."""
    return holds(shared_bytes(config, k, n, save_pre, sign_mask), config.blocks)


def registers(config: PackedConfig, k: int, n: int) -> int:
    """About how many registers a thread takes."""
    steps = -(-window(config.groups, k) // 8)
    return -(-n // (8 * config.parts)) * (2 * steps + 5) + _OTHER_REGISTERS


def service_warps(config: PackedConfig) -> int:
    """Warps that move tiles: two, or four that let the others have some of their registers."""
    warps = config.groups * config.parts
    return 4 if warps % 4 == 0 and warps * config.blocks >= 16 else 2


def limit(config: PackedConfig) -> tuple[int, int]:
    """Registers of a thread that computes, and at launch."""
    warps, service = config.groups * config.parts, service_warps(config)
    quarter = -(-(warps + service) * config.blocks // 4)  # warps of a part of a multiprocessor
    launch = launch_registers(quarter)
    if service == 2:
        return launch, launch
    quarter = (warps + service) // 4  # of one block
    return (launch * quarter - SERVICE_REGISTERS) // (warps // 4) // 8 * 8, launch


def widest(side: int, k: int, n: int) -> int:
    """The most groups that a strip may be wide, of whole 16 bytes, at most 512; 0: none may."""
    sizes = _sizes(side, k, n)
    wide = [p for p in sizes if p * max(k, n) * SIZE <= _MOST_STRIP]
    return max(wide or sizes[:1], default=0)


def _sizes(side: int, k: int, n: int) -> list[int]:
    return [p for p in (1, 2, 4, 8) if side % p == 0 and p * k % 8 == 0 and p * n % 8 == 0]


@lru_cache(maxsize=1024)
def packed_config(
    side: int,
    k: int,
    n: int,
    save_pre: bool,
    sign_mask: bool = False,
    groups: int | None = None,
    order: str = "tokens",
) -> PackedConfig | None:
    """The configuration for such groups of 16-bit numbers, ``side_by_side`` so many; None where no
    strip of them fits. ``signs``: of y, too, are results; ``groups``: so many make a strip;
    ``order``: of memory."""
    if min(k, n) < 1:
        return None
    sizes = [p for p in _sizes(side, k, n) if groups in (None, p)]
    most = _WEIGHT_REGISTERS // (2 * -(-k // 16))  # each step takes two of a tile of 8 outputs
    if k % 2 or n % 2 or most < 1 or not sizes:
        return None
    for p, parts, blocks, row, stages in _FIRST:
        config = PackedConfig(p, min(parts, -(-n // 8)), blocks=blocks)
        if p not in sizes or p * (k + n) > row or registers(config, k, n) > limit(config)[0]:
            continue
        if p == 1 and order == "tokens" and (k * SIZE % SECTOR or n * SIZE % SECTOR):
            continue
        if (made := _with_stages(config, k, n, save_pre, sign_mask, stages)) is not None:
            return made
    return _other(sizes, most, k, n, save_pre, sign_mask)


def finished(
    config: PackedConfig,
    k: int,
    n: int,
    save_pre: bool,
    sign_mask: bool = False,
    order: str = "tokens",
    aligned: bool = True,
) -> PackedConfig:
    """The same, mixed where registers are spare and staged where there is room for weights that
    begin at 16 bytes (``aligned``), if need be with a tile of y less.

    H100, 91 cases: staged 1.6% faster in the mean, 10% where a block has few tiles or 128 features,
    2.5% with a tile less; mixed another 1%, but signs of single groups of 104 and 112 features,
    groups first, 7% slower. What would spill is not mixed.
    """
    spare = limit(config)[0] - registers(config, k, n) - 4 * -(-n // (8 * config.parts))
    alone = sign_mask and order == "groups" and config.groups == 1
    config = replace(config, mixed=spare >= 0 and not alone)
    size = weight_bytes(order, config.groups, k, n)
    if aligned and size % 16 == 0:
        for outs in range(config.outs, max(2, config.outs - 1) - 1, -1):
            staged = replace(config, outs=outs, staged=size)
            if fits(staged, k, n, save_pre, sign_mask):
                return staged
    return config


def _other(
    sizes: list[int], most: int, k: int, n: int, save_pre: bool, sign_mask: bool
) -> PackedConfig | None:
    """What is taken of sizes of strips where none of ``_FIRST`` fits, ``most`` tiles of a warp."""
    tiles = -(-n // 8)
    wide = [p for p in reversed(sizes) if p * max(k, n) * 2 <= _MOST_STRIP]
    for p in wide or sizes[:1]:
        for blocks in (2, 1):
            several = list(range(1, min(tiles, _MOST_WARPS // p) + 1))
            if blocks == 1:  # of one block as many warps as have fewer tiles for it
                several.sort(key=lambda parts: -(-tiles // parts))
            for parts in several:
                config = PackedConfig(p, parts, blocks=blocks)
                if (
                    p * parts * blocks >= _GOOD_WARPS
                    and registers(config, k, n) <= limit(config)[0]
                    and (made := _with_stages(config, k, n, save_pre, sign_mask)) is not None
                ):
                    return made
    fewest = -(-tiles // most)
    parts = min(fewest, min(fewest + 1, tiles), key=lambda p: p * -(-tiles // p))
    if sizes[0] * parts > _MOST_WARPS:
        return None
    return _with_stages(PackedConfig(sizes[0], parts), k, n, save_pre, sign_mask)


def _with_stages(
    config: PackedConfig,
    k: int,
    n: int,
    save_pre: bool,
    sign_mask: bool,
    several: tuple[tuple[int, int], ...] = _STAGES,
) -> PackedConfig | None:
    """The first of such stages that shared memory holds."""
    for stages, outs in several:
        made = replace(config, stages=stages, outs=outs)
        if fits(made, k, n, save_pre, sign_mask):
            return made
    return None
