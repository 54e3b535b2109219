"""How ``packed_groups_backward_float32.cu`` is made and launched: the backward of many narrow
groups in float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fastlinear.families.grouped.cuda.packed_groups_float32 import (
    DEPTH,
    HEADER,
    SERVICE_WARPS,
    SIZE,
    limit,
)
from fastlinear.families.grouped.cuda.packed_groups_tiles import (
    OVERHEAD,
    SERVICE_REGISTERS,
    holds,
    source_of,
    tile_bytes,
)
from fastlinear.families.grouped.reference import Needs

KERNEL = "grouped_linear_strips_backward_float32"
SUMS_KERNEL = "grouped_linear_strips_sums_float32"
_PIECE = 256  # bytes of 8 by 8 weights that are not split
_STEP = 1024  # bytes; swizzled tiles begin at multiples of it
_LEAST_FEATURES, _MOST_FEATURES = 16, 128
LEAST_TILES = 2
"""Of a block that leaves a share of sums."""
LEAST_TOKENS = 16
"""Sums of fewer are closer to exact in PyTorch's arithmetic than three products are."""
NARROW = False
"""Whether boxes of 64 bytes are used: their addresses take registers that it has not to spare.
H200: 112 features took 169 us with them, 153 without."""
_OTHER_REGISTERS = 72  # of a thread: fragments, addresses, counters
_TEAM_REGISTERS = 24  # more where teams take turns
_DEEP, _UNROLLED = 216, 192  # registers up to which DEPTH steps at once find room, twice as many
_MOST_STAGES_AHEAD = 4
_PARTS = ((8, 1), (8, 2), (8, 4), (8, 8))
"""Warps that compute, and of them those of a team."""
_ROOMS = ((True, 1, 1), (True, 1, 0), (False, 1, 1), (False, 0, 1), (False, 0, 0))
"""Split weights, stages beyond two of a team, tiles of dx beyond one: the best that fits first."""


@dataclass(frozen=True)
class Float32BackwardConfig:
    """One way to launch the kernel.

    Attributes:
        teams: tiles that a block computes at once.
        down, across: warps of a team, which share a tile, along the rows and the columns of dW.
        stages: tiles of dy, of what was saved and of x in shared memory, twice as many as teams at
            least.
        outs: tiles of dx there, as many as teams at least.
        split: whether weights are cut in two in shared memory, not at every use.
        groups, blocks: groups of a strip, blocks of a multiprocessor: one.
    """

    teams: int
    down: int
    across: int
    stages: int = 2
    outs: int = 1
    split: bool = True
    groups: int = 1
    blocks: int = 1

    @property
    def parts(self) -> int:
        """Warps of a team."""
        return self.down * self.across

    @property
    def warps(self) -> int:
        """Warps that compute."""
        return self.teams * self.parts

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + SERVICE_WARPS)


def shared_bytes(config: Float32BackwardConfig, k: int, n: int, saved: bool, needs: Needs) -> int:
    """Dynamic shared memory of a block."""
    dy, x = tile_bytes(n, SIZE), tile_bytes(k, SIZE)
    piece = _PIECE * (2 if config.split else 1)
    weights = -(-(-(-k // 8) * -(-n // 8) * piece) // _STEP) * _STEP if needs[0] else 0
    outs = config.outs * x if needs[0] else 0
    stage = (2 if saved else 1) * dy + (x if needs[1] else 0)
    sums = config.warps * n * SIZE
    return OVERHEAD + weights + config.stages * stage + outs + sums


def registers(config: Float32BackwardConfig, k: int, n: int) -> int:
    """About how many registers a thread takes."""
    dw = -(-n // (16 * config.down)) * -(-k // (8 * config.across))
    dx = -(-k // (8 * max(1, config.parts // 2))) * (2 if config.parts == 1 else 1)
    return 8 * (dw + dx) + _OTHER_REGISTERS + (_TEAM_REGISTERS if config.teams > 1 else 0)


def fits(config: Float32BackwardConfig, k: int, n: int, saved: bool, needs: Needs) -> bool:
    """Whether a multiprocessor's shared memory holds its block."""
    return holds(shared_bytes(config, k, n, saved, needs), config.blocks)


@lru_cache(maxsize=1024)
def float32_backward_config(
    k: int, n: int, saved: bool = True, needs: Needs = (True, True, True)
) -> Float32BackwardConfig | None:
    """The configuration for groups of such sizes; None where none fits.

    As many teams as their warps' registers hold dW: they wait for each other least.
    """
    if k % 4 or n % 4 or min(k, n) < _LEAST_FEATURES or max(k, n) > _MOST_FEATURES:
        return None
    rows, columns = -(-n // 16), -(-k // 8)
    for warps, parts in _PARTS:
        cuts = [
            (down, parts // down)
            for down in range(1, parts + 1)
            if parts % down == 0 and down <= rows and parts // down <= columns
        ]
        if parts > 2 * columns or not cuts:
            continue
        down, across = min(cuts, key=lambda c: _reads(rows, columns, *c))
        teams = warps // parts
        for split, ahead, outs in _ROOMS:
            for stages in range(2 * teams + _MOST_STAGES_AHEAD, 2 * teams + ahead - 1, -1):
                made = Float32BackwardConfig(teams, down, across, stages, teams + outs, split)
                room = limit(made.warps)[0]
                if registers(made, k, n) <= room and fits(made, k, n, saved, needs):
                    return made
    return None


def _reads(rows: int, columns: int, down: int, across: int) -> tuple[int, int]:
    """Products of the warp that has most of dW, then numbers that a lane reads for them."""
    mine, beside = -(-rows // down), -(-columns // across)
    return mine * beside, 4 * mine + 2 * beside


def source(
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: Float32BackwardConfig,
    shared: bool = False,
) -> str:
    """The complete CUDA C++ source of one specialisation."""
    macros = {
        "IS_BF16": 0,
        "SIZE": SIZE,
        "SHARED": int(shared),
        "NARROW": int(NARROW),
        "K": k,
        "N": n,
        "P": 1,
        "TEAMS": config.teams,
        "DOWN": config.down,
        "ACROSS": config.across,
        "STAGES": config.stages,
        "OUTS": config.outs,
        "SPLIT": int(config.split),
        "DEPTH": DEPTH if registers(config, k, n) <= _DEEP else 1,
        "UNROLL": 2 if registers(config, k, n) <= _UNROLLED else 1,
        "REGISTERS": limit(config.warps)[0],
        "SERVICE_REGISTERS": SERVICE_REGISTERS,
        **{f"NEED_{name}": int(need) for name, need in zip(("DX", "DW", "DB"), needs, strict=True)},
    }
    return source_of("packed_groups_backward_float32.cu", activation, macros, (HEADER,))
