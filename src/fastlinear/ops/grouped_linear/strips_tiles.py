"""What both kernels of strips of narrow groups share: tiles as the copy engine moves them, the room
of a multiprocessor, and which tiles a block takes (``strips_tiles.h``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.activations import NAMES

ROWS = 32
"""Tokens of a tile."""
SIZE = 2
"""Bytes of a number."""
SWIZZLED = 128
"""Bytes of a row of the copy engine's widest swizzle."""
BOX = 256
"""Columns that one copy moves."""
OVERHEAD = 2 * 1024
"""Bytes of a block's shared memory for the barriers, and what aligns them."""
SERVICE_REGISTERS = 40
"""Of a thread that computes nothing, where the others take some of its registers."""
WORTH = 0.75
"""Whole chunks of strips where they are that part of the blocks that run at once: backward, 100 of
132 blocks, each of one strip, took 118 us where 132 took 125."""
LEAST_TILES = 4
"""Of a block that leaves a share of sums, which else costs more than its products."""
_STEP = 1024  # bytes; swizzled tiles begin at multiples of it
_SHARED, _BLOCK_SHARED = 228 * 1024, 227 * 1024  # of a multiprocessor, of a block
_RESERVED = 1024  # bytes of a block that the system takes
_REGISTERS, _MOST_REGISTERS = 65536, 255
_MOST = 2**23
_HERE = Path(__file__).parent


def box_columns(columns: int) -> int:
    """Columns of the boxes that a strip is cut into: as few as can be, of whole 16 bytes."""
    if columns * SIZE % SWIZZLED == 0:
        return SWIZZLED // SIZE
    return next(c for c in range(BOX, 0, -8) if columns % c == 0)


def tile_bytes(columns: int) -> int:
    """Room for a tile."""
    return -(-ROWS * columns * SIZE // _STEP) * _STEP


def tensor_map(
    dtype: torch.dtype, m: int, columns: int, stride: int, strip: int, address: int, device: int
) -> driver.TensorMap:
    """Tiles of (m, columns) numbers, rows ``stride`` apart, whose strips have so many columns."""
    return driver.TensorMap(
        *(DTYPE_NAMES[dtype], m, columns, stride, ROWS, box_columns(strip), address, device),
        plain=strip * SIZE % SWIZZLED != 0,
    )


def holds(shared: int, blocks: int) -> bool:
    """Whether a multiprocessor has room for so many blocks of ``shared`` bytes."""
    return shared <= _BLOCK_SHARED and (shared + _RESERVED) * blocks <= _SHARED


def launch_registers(warps: int) -> int:
    """Of a thread at launch, where each part of a multiprocessor gets so many warps."""
    return min(_MOST_REGISTERS, _REGISTERS // (warps * 128) // 8 * 8)


def window(groups: int, features: int) -> int:
    """Words of a group of a strip, and of what lies before it from 16 bytes on."""
    early = 0 if groups == 1 or features % 8 == 0 else 3 if features % 4 else 2
    return features // 2 + early


def source_of(file: str, activation: str, macros: Mapping[str, int]) -> str:
    """A kernel's complete CUDA C++ source behind its macros."""
    acts = {f"ACT_{name.upper()}": number for number, name in enumerate(NAMES)}
    named = {**acts, "ACT": f"ACT_{activation.upper()}", **macros}
    text = "".join(f"#define {name} {value}\n" for name, value in named.items())
    parts = "strips_instructions.h", "strips_tiles.h", "../common/hopper_activations.h", file
    return text + "".join((_HERE / part).read_text() for part in parts)


def reason_not(p: Problem) -> str | None:
    """Why neither kernel can serve such a Problem, whatever its groups' sizes, or None."""
    if p.device != "cuda":
        return "its kernel runs on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "its kernel is written for compute capability 9.0"
    if p.dtype not in ("bfloat16", "float16"):
        return f"serves bfloat16 and float16, not {p.dtype}"
    if (p.option("order"), p.option("x"), p.option("w")) != ("tokens", "dense", "dense"):
        return "serves dense tensors, tokens first"
    if max(p.dim("M"), p.dim("G") * max(p.dim("K"), p.dim("N"))) > _MOST:
        return f"sizes must stay below {_MOST}"
    return None


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
        least: int = LEAST_TILES,
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
