"""How strips_backward.cu is launched: strips, warps, stages, and which tiles a block takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fastlinear.ops.grouped_linear.reference import Needs
from fastlinear.ops.grouped_linear.strips_tiles import SIZE, SWIZZLED, tile_bytes

SERVICE_REGISTERS = 40
"""Of a thread that computes nothing."""
_BOX = 256  # columns that one copy moves
_SHARED, _BLOCK_SHARED = 228 * 1024, 227 * 1024  # of a multiprocessor, of a block
_RESERVED = 1024  # bytes of a block that the system takes
_OVERHEAD = 2 * 1024  # the barriers, and what aligns them
_BEYOND = 4096  # bytes behind x that a window may reach
_REGISTERS, _MOST_REGISTERS = 65536, 255
_OTHER_REGISTERS = 44  # of a thread: fragments, addresses, counters
_GOOD_WARPS, _MOST_WARPS = 8, 16
_PARTS = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2))  # of a group: warps, those across
_MOST_FEATURES = 128
_MOST_STRIP = 512  # bytes
_MOST_STAGES = 6
WORTH = 0.75  # 100 of 132 blocks, each of one strip, took 118 us where 132 took 125;
WORTH_PLAIN = 0.9  # without a derivative, which is more of a strip's own work, 111 us and 98
_LEAST_TILES = 4  # of a block, else its share costs more than its products


@dataclass(frozen=True)
class StripsBackwardConfig:
    """One way to launch the kernel.

    Attributes:
        groups: groups of a strip.
        parts: warps of a group.
        across: how many of them lie along the columns of dW; the others along its rows.
        stages: tiles of dy, saved and x in shared memory.
        outs: tiles of dx in shared memory.
        blocks: blocks of a multiprocessor.
    """

    groups: int
    parts: int
    across: int = 1
    stages: int = 4
    outs: int = 2
    blocks: int = 1


def _window(groups: int, features: int) -> int:
    """Words of a group, and of what lies before it from 16 bytes on."""
    early = 0 if groups == 1 or features % 8 == 0 else 3 if features % 4 else 2
    return features // 2 + early


def shared_bytes(config: StripsBackwardConfig, k: int, n: int, saved: bool, needs: Needs) -> int:
    """Dynamic shared memory of a block."""
    dy, x = (tile_bytes(config.groups * width) for width in (n, k))
    stage = dy * (2 if saved else 1) + (x if needs[1] else 0)
    outs = config.outs * x if needs[0] else 0
    return _OVERHEAD + config.stages * stage + max(outs, _BEYOND)


def registers(config: StripsBackwardConfig, k: int, n: int) -> int:
    """About how many registers a thread takes."""
    rows, columns = -(-_window(config.groups, n) // 8), -(-_window(config.groups, k) // 4)
    dw = -(-rows // (config.parts // config.across)) * -(-columns // config.across)
    words = _window(config.groups, n)
    of_tile = 2 * (words // 8) + (0 if words % 8 == 0 else 1 if words % 8 <= 4 else 2)
    tiles = -(-k // 8)
    return 4 * dw + -(-tiles // config.parts) * (of_tile + 4) + _OTHER_REGISTERS


def service_warps(config: StripsBackwardConfig) -> int:
    """Warps that move tiles: one, or four of which three let the others have their registers."""
    warps = config.groups * config.parts
    return 4 if warps % 4 == 0 and warps > 4 and config.blocks == 1 else 1


def limit(config: StripsBackwardConfig) -> tuple[int, int]:
    """Registers of a thread that computes, and at launch."""
    warps, service = config.groups * config.parts, service_warps(config)
    quarter = -(-(warps + service) * config.blocks // 4)  # warps of a part of a multiprocessor
    launch = min(_MOST_REGISTERS, _REGISTERS // (quarter * 128) // 8 * 8)
    if service == 1:
        return launch, launch
    return (launch * quarter - SERVICE_REGISTERS) // (warps // 4) // 8 * 8, launch


def reason_against(config: StripsBackwardConfig, groups: int, k: int, n: int) -> str | None:
    """Why such groups cannot be cut in that way, or None."""
    p, parts = config.groups, config.parts
    if k % 2 or n % 2 or groups % p or p * k % 8 or p * n % 8:
        return "strips must be of whole 16 bytes"
    for features in (k, n):
        if p * features * SIZE % SWIZZLED and p * features > _BOX:
            return f"rows of {p * features} numbers take several copies"
    rows = -(-_window(p, n) // 8)
    if parts % config.across or parts // config.across > rows or parts > -(-k // 8):
        return "more warps than tiles"
    if -(-_window(p, k) // 4) < config.across or p * parts > _MOST_WARPS:
        return "more warps than tiles"
    return None


@lru_cache(maxsize=1024)
def strips_backward_config(
    groups: int, k: int, n: int, saved: bool = True, needs: Needs = (True, True, True)
) -> StripsBackwardConfig | None:
    """The configuration for such groups of 16-bit numbers; None where none serves."""
    if max(k, n) > _MOST_FEATURES:
        return None
    widths = [p for p in (8, 4, 2, 1) if p * max(k, n) * SIZE <= _MOST_STRIP]
    for least in (_GOOD_WARPS, 1):
        for p in widths:
            for parts, across in _PARTS:
                config = StripsBackwardConfig(p, parts, across)
                if (
                    p * parts >= least
                    and reason_against(config, groups, k, n) is None
                    and registers(config, k, n) <= limit(config)[0]
                ):
                    return _with_stages(config, k, n, saved, needs)
    return None


def _with_stages(
    config: StripsBackwardConfig, k: int, n: int, saved: bool, needs: Needs
) -> StripsBackwardConfig | None:
    """As many stages as shared memory holds.

    The groups of a strip drift apart: 4 and more get 4 tiles of dx where 3 stages remain.
    """
    outs = 4 if config.groups >= 4 and needs[0] else config.outs
    for made_outs, least in ((outs, 3), (config.outs, 2)):
        for stages in range(_MOST_STAGES, least - 1, -1):
            made = replace(config, stages=stages, outs=made_outs)
            if fits(made, k, n, saved, needs):
                return made
    return None


def fits(config: StripsBackwardConfig, k: int, n: int, saved: bool, needs: Needs) -> bool:
    """Whether a multiprocessor's shared memory holds its blocks."""
    shared = shared_bytes(config, k, n, saved, needs)
    return shared <= _BLOCK_SHARED and (shared + _RESERVED) * config.blocks <= _SHARED


class Split:
    """How strips * tiles tiles are shared out: block b takes ``each`` of them, or one more.

    Whole chunks of strips, so that each block has tiles of one strip, where these are ``worth`` a
    part of the blocks that run at once.

    Attributes:
        blocks: of the launch.
        each, more: tiles of a block; how many blocks take one more.
        slots: the most blocks that share a strip.
    """

    def __init__(
        self,
        strips: int,
        tiles: int,
        at_once: int,
        worth: float = WORTH,
        least: int = _LEAST_TILES,
    ) -> None:
        total = strips * tiles
        whole = at_once // strips * strips
        if whole >= worth * at_once:
            at_once = whole
        self.blocks = min(total, at_once, max(strips, total // least))
        self.each, self.more = divmod(total, self.blocks)
        ends = (
            (self.block_of(s * tiles), self.block_of((s + 1) * tiles - 1)) for s in range(strips)
        )
        self.slots = max(last - first + 1 for first, last in ends)

    def block_of(self, tile: int) -> int:
        """The block that takes a tile."""
        full = self.more * (self.each + 1)
        if tile < full:
            return tile // (self.each + 1)
        return self.more + (tile - full) // self.each
