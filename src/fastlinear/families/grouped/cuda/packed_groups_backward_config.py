"""How packed_groups_backward.cu is launched: strips, warps, stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fastlinear.families.grouped.cuda.packed_groups_tiles import (
    BOX,
    LINE,
    OVERHEAD,
    SECTOR,
    SERVICE_REGISTERS,
    SIZE,
    holds,
    launch_registers,
    sign_bytes,
    swizzle,
    tile_bytes,
    weight_bytes,
    window,
)
from fastlinear.families.grouped.reference import Needs

_BEYOND = 4096  # bytes behind x that a window may reach
_OTHER_REGISTERS = 44  # of a thread: fragments, addresses, counters
_GOOD_WARPS, _MOST_WARPS = 8, 16
_PARTS = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2))  # of a group: warps, those across
_MOST_FEATURES = 128
_MOST_STRIP = 512  # bytes
_MOST_STAGES = 4
_FIRST = (  # groups of a strip, warps of a group, those across, blocks, numbers of x and dy a row
    (8, 1, 1, 2, range(401)),
    (8, 1, 1, 1, range(480, 513)),
    (4, 1, 1, 2, range(321)),
    (2, 2, 2, 2, range(257)),
    (1, 4, 2, 2, range(193)),
    (2, 4, 2, 1, range(481)),
    (4, 2, 2, 1, range(601)),
    (1, 4, 2, 1, range(240)),
)
"""What is taken first where it fits, of tokens first what begins at whole lines or sectors. H200,
16 to 128 features, 96 groups, 30 million numbers, all ways of which two stages fit, while
developing: about 2% behind the fastest of each size, what was chosen before these 12%."""
_FIRST_SHARED = ((4, 2, 2, 1, range(500, 513)), *_FIRST)  # where groups come first
_UNDER_WAY = 122 * 1024  # bytes that a multiprocessor asks fast memory for
_LEAST_STAGED = 40 * 40  # numbers of a group's W beyond which it is staged
_SPARE, _SPARE_SAVED = 4, 6  # registers that must be left, with derivatives


@dataclass(frozen=True)
class PackedBackwardConfig:
    """One way to launch the kernel.

    Attributes:
        groups: groups of a strip, or tokens of a group where groups come first.
        parts: warps of a group.
        across: how many of them lie along the columns of dW; the others along its rows.
        stages: tiles of dy, of what was saved and of x in shared memory.
        outs: tiles of dx in shared memory.
        blocks: blocks of a multiprocessor.
        staged: bytes of shared memory through which a strip's W comes, 0: none.
    """

    groups: int
    parts: int
    across: int = 1
    stages: int = 4
    outs: int = 2
    blocks: int = 1
    staged: int = 0


def shared_bytes(
    config: PackedBackwardConfig, k: int, n: int, saved: bool, needs: Needs, sign_mask: bool = False
) -> int:
    """Dynamic shared memory of a block; ``signs``: these alone were saved."""
    stage = stage_bytes(config, k, n, saved, needs, sign_mask)
    outs = config.outs * tile_bytes(config.groups * k) if needs[0] else 0
    of_signs = config.stages * sign_bytes(config.groups * n) if sign_mask else 0
    room = OVERHEAD + config.stages * stage + -(-of_signs // 1024) * 1024
    return room + max(outs + config.staged, _BEYOND)


def stage_bytes(
    config: PackedBackwardConfig, k: int, n: int, saved: bool, needs: Needs, sign_mask: bool = False
) -> int:
    """Of a stage, signs apart."""
    dy, x = (tile_bytes(config.groups * width) for width in (n, k))
    return dy * (2 if saved and not sign_mask else 1) + (x if needs[1] else 0)


def registers(config: PackedBackwardConfig, k: int, n: int) -> int:
    """About how many registers a thread takes."""
    rows, columns = -(-window(config.groups, n) // 8), -(-window(config.groups, k) // 4)
    dw = -(-rows // (config.parts // config.across)) * -(-columns // config.across)
    words = window(config.groups, n)
    of_tile = 2 * (words // 8) + (0 if words % 8 == 0 else 1 if words % 8 <= 4 else 2)
    tiles = -(-k // 8)
    return 4 * dw + -(-tiles // config.parts) * (of_tile + 4) + _OTHER_REGISTERS


def service_warps(config: PackedBackwardConfig) -> int:
    """Warps that move tiles: one, or four of which three let the others have their registers."""
    warps = config.groups * config.parts
    return 4 if warps % 4 == 0 and warps > 4 and config.blocks == 1 else 1


def limit(config: PackedBackwardConfig) -> tuple[int, int]:
    """Registers of a thread that computes, and at launch."""
    warps, service = config.groups * config.parts, service_warps(config)
    quarter = -(-(warps + service) * config.blocks // 4)  # warps of a part of a multiprocessor
    launch = launch_registers(quarter)
    if service == 1:
        return launch, launch
    return (launch * quarter - SERVICE_REGISTERS) // (warps // 4) // 8 * 8, launch


def reason_against(config: PackedBackwardConfig, side: int, k: int, n: int) -> str | None:
    """Why such groups cannot be cut in that way, or None."""
    p, parts = config.groups, config.parts
    if k % 2 or n % 2 or side % p or p * k % 8 or p * n % 8:
        return "strips must be of whole 16 bytes"
    for features in (k, n):
        if not swizzle(p, features) and p * features > BOX:
            return f"rows of {p * features} numbers take several copies"
    rows = -(-window(p, n) // 8)
    if parts % config.across or parts // config.across > rows or parts > -(-k // 8):
        return "more warps than tiles"
    if -(-window(p, k) // 4) < config.across or p * parts > _MOST_WARPS:
        return "more warps than tiles"
    return None


@lru_cache(maxsize=1024)
def packed_backward_config(
    side: int,
    k: int,
    n: int,
    saved: bool = True,
    needs: Needs = (True, True, True),
    sign_mask: bool = False,
    order: str = "tokens",
) -> PackedBackwardConfig | None:
    """The configuration for such groups of 16-bit numbers, ``side_by_side`` so many; None where
    none serves. ``signs``: these alone were saved; ``order``: of memory."""
    if max(k, n) > _MOST_FEATURES:
        return None
    first = _FIRST if order == "tokens" else _FIRST_SHARED
    spare = _SPARE_SAVED if saved and not sign_mask else _SPARE
    for whole in (LINE, SECTOR, SIZE) if order == "tokens" else (SIZE,):
        for p, parts, across, blocks, row in first:
            config = PackedBackwardConfig(p, parts, across, blocks=blocks)
            if p * k * SIZE % whole or p * n * SIZE % whole:
                continue
            if (
                p * (k + n) in row
                and reason_against(config, side, k, n) is None
                and registers(config, k, n) + spare <= limit(config)[0]
                and (made := _with_stages(config, k, n, saved, needs, sign_mask)) is not None
            ):
                return made
    widths = [p for p in (8, 4, 2, 1) if p * max(k, n) * SIZE <= _MOST_STRIP]
    for least in (_GOOD_WARPS, 1):
        for p in widths:
            for parts, across in _PARTS:
                config = PackedBackwardConfig(p, parts, across)
                if (
                    p * parts >= least
                    and reason_against(config, side, k, n) is None
                    and registers(config, k, n) + spare <= limit(config)[0]
                ):
                    return _with_stages(config, k, n, saved, needs, sign_mask)
    return None


def finished(
    config: PackedBackwardConfig,
    k: int,
    n: int,
    saved: bool,
    needs: Needs,
    sign_mask: bool = False,
    order: str = "tokens",
    aligned: bool = True,
) -> PackedBackwardConfig:
    """The same, staged where that pays and there is room for W that begins at 16 bytes
    (``aligned``), if need be with a stage less.

    H100, 98 cases: 1.2 to 1.7% faster in the mean, up to 10 with few tiles; up to 3% slower of up
    to 40 features, and 1% of strips of 4 tokens of a group.
    """
    size = weight_bytes(order, config.groups, k, n)
    wide = order == "groups" and config.groups >= 4
    if needs[0] and aligned and size % 16 == 0 and n * k > _LEAST_STAGED and not wide:
        for stages in range(config.stages, max(2, config.stages - 1) - 1, -1):
            staged = replace(config, stages=stages, staged=size)
            if fits(staged, k, n, saved, needs, sign_mask):
                return staged
    return config


def _with_stages(
    config: PackedBackwardConfig, k: int, n: int, saved: bool, needs: Needs, sign_mask: bool
) -> PackedBackwardConfig | None:
    """As many stages as shared memory holds, and as memory takes at a time.

    The groups of a strip drift apart: 4 and more get 4 tiles of dx.
    """
    most = _UNDER_WAY // (config.blocks * stage_bytes(config, k, n, saved, needs, sign_mask))
    for outs in (4, 2) if config.groups >= 4 and needs[0] else (config.outs,):
        for stages in range(max(2, min(_MOST_STAGES, most)), 1, -1):
            made = replace(config, stages=stages, outs=outs)
            if fits(made, k, n, saved, needs, sign_mask):
                return made
    return None


def fits(
    config: PackedBackwardConfig, k: int, n: int, saved: bool, needs: Needs, sign_mask: bool = False
) -> bool:
    """Whether a multiprocessor's shared memory holds its blocks."""
    return holds(shared_bytes(config, k, n, saved, needs, sign_mask), config.blocks)
