"""How ``strips_float32.cu`` is made and launched: the forward of many narrow groups in float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fastlinear.ops.grouped_linear.strips_tiles import (
    OVERHEAD,
    SERVICE_REGISTERS,
    holds,
    launch_registers,
    source_of,
    tile_bytes,
)

KERNEL = "grouped_linear_strips_float32"
SIZE = 4
"""Bytes of a number."""
_PIECE = 512  # bytes of the weights of 8 outputs and 8 columns: two numbers of 11 bits for each
_STEP = 1024  # bytes; swizzled tiles begin at multiples of it
_WARPS, _SERVICE_WARPS = 8, 4
_QUARTER, _OF_THEM = 3, 2  # warps of a part of a multiprocessor, those of them that compute
LAUNCH_REGISTERS = launch_registers(_QUARTER)
REGISTERS = (LAUNCH_REGISTERS * _QUARTER - SERVICE_REGISTERS) // _OF_THEM // 8 * 8
"""Of a thread that computes."""
_MOST_TILES = 7  # of 8 outputs, whose sums a warp's registers hold for 32 tokens
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
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.teams * self.parts + _SERVICE_WARPS)


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
    for parts in (1, 2, 4, 8):
        if parts <= tiles <= parts * _MOST_TILES:
            teams = _WARPS // parts
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
        "REGISTERS": REGISTERS,
        "SERVICE_REGISTERS": SERVICE_REGISTERS,
        "HAS_BIAS": int(has_bias),
        "SAVE_PRE": int(save_pre),
    }
    return source_of("strips_float32.cu", activation, macros)
