"""How ``packed_groups_float32.cu`` is made and launched: the forward of many narrow groups in
float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fastlinear.families.grouped.cuda.packed_groups_tiles import (
    OVERHEAD,
    SERVICE_REGISTERS,
    holds,
    launch_registers,
    source_of,
    tile_bytes,
)

KERNEL = "grouped_linear_strips_float32"
HEADER = "packed_groups_float32.h"
SIZE = 4
"""Bytes of a number."""
DEPTH = 2
"""Steps of 8 numbers whose products of high halves the multiplier sums up; the rest is float32's.
Two are within 5% as exact as one."""
_PIECE = 512  # bytes of the weights of 8 outputs and 8 columns: two numbers of 11 bits for each
_STEP = 1024  # bytes; swizzled tiles begin at multiples of it
_PARTS = ((8, 1), (8, 2), (12, 4), (8, 4), (8, 8))
"""Warps that compute, and of them those of a team."""
SERVICE_WARPS = 4
"""Of a block, beside those that compute."""
_MOST_TILES = {8: 7, 12: 4}  # of 8 outputs, whose sums the registers of so many warps hold
_UNROLLED_TILES = {8: 5, 12: 0}  # with which there is room to work on two times DEPTH steps at once
_LEAST_FEATURES = 32  # PyTorch's error falls with the depth, that of three products does not
_AHEAD = 4  # tiles of x beyond those that are computed


@dataclass(frozen=True)
class Float32Config:
    """One way to launch the kernel.

    Attributes:
        teams: tiles that a block computes at once.
        parts: warps of a team, which share its tile's outputs.
        stages, outs: tiles of x and of y in shared memory, as many as teams at least.
        groups, blocks: groups of a strip, blocks of a multiprocessor: one.
    """

    teams: int
    parts: int
    stages: int = 6
    outs: int = 4
    groups: int = 1
    blocks: int = 1

    @property
    def warps(self) -> int:
        """Warps that compute."""
        return self.teams * self.parts

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + SERVICE_WARPS)


def limit(warps: int) -> tuple[int, int]:
    """Registers of a thread of so many warps that compute, and at launch."""
    quarter = (warps + SERVICE_WARPS) // 4  # warps of a part of a multiprocessor
    launch = launch_registers(quarter)
    return (launch * quarter - SERVICE_REGISTERS) // (quarter - 1) // 8 * 8, launch


def shared_bytes(config: Float32Config, k: int, n: int, save_pre: bool) -> int:
    """Dynamic shared memory of a block."""
    tiles, steps = -(-n // 8), -(-k // 8)
    held = -(-(tiles * (steps * _PIECE + 32)) // _STEP) * _STEP
    x, y = tile_bytes(k, SIZE), tile_bytes(n, SIZE)
    return OVERHEAD + held + config.stages * x + config.outs * y * (2 if save_pre else 1)


def fits(config: Float32Config, k: int, n: int, save_pre: bool) -> bool:
    """Whether a multiprocessor's shared memory holds its block."""
    return holds(shared_bytes(config, k, n, save_pre), config.blocks)


@lru_cache(maxsize=1024)
def float32_config(k: int, n: int, save_pre: bool) -> Float32Config | None:
    """The configuration for groups of such sizes; None where none fits."""
    if k % 4 or n % 4 or k < _LEAST_FEATURES:
        return None
    tiles = -(-n // 8)
    for warps, parts in _PARTS:
        if parts <= tiles <= parts * _MOST_TILES[warps]:
            teams = warps // parts
            for stages in range(teams + _AHEAD, teams, -1):
                made = Float32Config(teams, parts, stages, outs=teams)
                if fits(made, k, n, save_pre):
                    return made
    return None


def source(
    k: int,
    n: int,
    activation: str,
    has_bias: bool,
    save_pre: bool,
    config: Float32Config,
    shared: bool = False,
) -> str:
    """The complete CUDA C++ source of one specialisation."""
    macros = {
        "IS_BF16": 0,
        "SIZE": SIZE,
        "SHARED": int(shared),
        "K": k,
        "N": n,
        "P": 1,
        "TEAMS": config.teams,
        "PARTS": config.parts,
        "STAGES": config.stages,
        "OUTS": config.outs,
        "DEPTH": DEPTH,
        "UNROLL": 2 if -(-n // (8 * config.parts)) <= _UNROLLED_TILES[config.warps] else 1,
        "REGISTERS": limit(config.warps)[0],
        "SERVICE_REGISTERS": SERVICE_REGISTERS,
        "HAS_BIAS": int(has_bias),
        "SAVE_PRE": int(save_pre),
    }
    return source_of("packed_groups_float32.cu", activation, macros, (HEADER,))
