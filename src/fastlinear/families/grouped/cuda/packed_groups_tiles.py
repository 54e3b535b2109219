"""What both kernels of strips of narrow groups share: tiles as the copy engine moves them, the room
of a multiprocessor, and which tiles a block takes (``packed_groups_tiles.h``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.activations.reference import CUDA_HEADER, cuda_macros
from fastlinear.core.device import memory_rate
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.kernels.cuda.hopper import WORDS
from fastlinear.native import cuda_driver as driver

ROWS = 32
"""Rows of a tile."""
SIZE = 2
"""Bytes of a number, where nothing else is said."""
ORDERS = ("tokens", "groups")
"""Of memory, that are served."""
_SWIZZLES = (128, 64)  # bytes of a row of a box that the copy engine swizzles
BOX = 256
"""Columns that one copy moves."""
OVERHEAD = 2 * 1024
"""Bytes of a block's shared memory for the barriers, and what aligns them."""
SERVICE_REGISTERS = 40
"""Of a thread that computes nothing, where the others take some of its registers."""
UNDER_WAY = 80 * 1024
"""Bytes that a multiprocessor may have asked slow memory for. H100: groups of 64 features take
150 us backward with 2 stages of 33 KB, 170 with 4; of 100 111 with 100 blocks of 3 stages of 27 KB,
134 with 132 blocks of 6."""
_SLOW_MEMORY = 4e12  # bytes a second; an H100's is rated at 3.4e12, an H200's at 4.9e12
_AS_SOON, _AS_SOON_SLOW = 1.03, 1.34
"""H200, backward: 256 blocks of 64 tiles, each of one strip, took 107 us where 264 of 62 or 63
took 117; 120 of 41 took 65 where 132 of 37 took 61. H100: 100 of 64 took 114 where 132 of 49 took
126."""
EXACTLY = 0.0
"""No later at all: whole chunks of strips only where they are as many as the blocks that run."""
LINE, SECTOR = 128, 32
"""Bytes; memory sees both parts of what two strips share."""
LEAST_TILES = 4
"""Of a block that leaves a share of sums, which else costs more than its products."""
LEAST_WHOLE = 16
"""Tiles of a strip. H100, forward, one block on a multiprocessor: 100 whole strips of 64 tiles took
65 us where 132 blocks of 49 took 72, of 16 19.6 and 20.4, of 8 16.5 and 15.3; two blocks on each
gained nothing in the mean."""
_STEP = 1024  # bytes; swizzled tiles begin at multiples of it
_SHARED, _BLOCK_SHARED = 228 * 1024, 227 * 1024  # of a multiprocessor, of a block
_RESERVED = 1024  # bytes of a block that the system takes
_REGISTERS, _MOST_REGISTERS = 65536, 255
_MOST = 2**23
_HERE = Path(__file__).parent


def swizzle(groups: int, features: int, size: int = SIZE, narrow: bool = True) -> int:
    """Bytes of a row of the boxes that a strip of such groups is cut into where these are swizzled,
    or 0; ``narrow``: they may be 64."""
    if groups > 1 and features * size % 16:  # a group's window may end in the next box
        return 0
    sizes = _SWIZZLES if narrow else _SWIZZLES[:1]
    return next((b for b in sizes if groups * features * size % b == 0), 0)


def box_columns(groups: int, features: int, size: int = SIZE, narrow: bool = True) -> int:
    """Columns of the boxes that a strip is cut into: as few as can be, of whole 16 bytes."""
    if swizzled := swizzle(groups, features, size, narrow):
        return swizzled // size
    columns = groups * features
    return next(c for c in range(BOX, 0, -16 // size) if columns % c == 0)


def tile_bytes(columns: int, size: int = SIZE) -> int:
    """Room for a tile."""
    return -(-ROWS * columns * size // _STEP) * _STEP


def weight_bytes(order: str, groups: int, k: int, n: int) -> int:
    """Of a strip's weights: of one group where groups come first."""
    return (1 if order == "groups" else groups) * n * k * SIZE


def sign_bytes(columns: int) -> int:
    """A tile's signs."""
    return ROWS * columns // 8


class Cut(NamedTuple):
    """How (1, M, G, features) is cut into strips.

    Tokens first, a strip is P groups that lie side by side, and a row a token. Groups first
    (``shared``) it is one group, and a row P tokens, one behind the other: so one group of P * K
    numbers stands for P groups of K numbers that share a weight.

    Attributes:
        shared: whether groups come first.
        groups, strips, rows: G, strips in all, rows of a strip.
        p: groups, or tokens, side by side.
    """

    shared: bool
    groups: int
    strips: int
    rows: int
    p: int

    @classmethod
    def of(cls, order: str, m: int, groups: int, p: int) -> Cut:
        """The strips of tensors of that order of memory."""
        if order == "groups":
            return cls(True, groups, groups, m // p, p)
        return cls(False, groups, groups // p, m, p)

    @property
    def tiles(self) -> int:
        """Tiles of a strip."""
        return -(-self.rows // ROWS)

    def map(
        self,
        dtype: torch.dtype,
        features: int,
        stride: int,
        address: int,
        device: int,
        narrow: bool = True,
    ) -> driver.TensorMap:
        """Tiles of a tensor of so many features a group, whose tokens are ``stride`` apart where
        they come first; ``narrow``: of boxes of 64 bytes, too."""
        columns, size = self.p * features, dtype.itemsize
        swizzled = swizzle(self.p, features, size, narrow)
        wide, planes = (columns, self.groups) if self.shared else (self.groups * features, 0)
        return driver.TensorMap(
            *(DTYPE_NAMES[dtype], self.rows, wide, wide if self.shared else stride),
            *(ROWS, box_columns(self.p, features, size, narrow), address, device),
            narrow=swizzled == 64,
            plain=swizzled == 0,
            planes=planes,
        )


def ordinal(t: Tensor) -> int:
    """Of the device that t is on."""
    assert t.device.index is not None
    return t.device.index


def side_by_side(order: str, m: int, groups: int) -> int:
    """What strips are cut from: groups, or tokens of a group; as far as it matters which numbers
    divide it."""
    return math.gcd(m, 16) if order == "groups" else groups


def has_dense_rows(t: Tensor, order: str) -> bool:
    """Whether strips can be cut from t (1, M, G, features): dense groups of a token, or all dense
    groups first, and 16 bytes everywhere."""
    _, m, groups, features = t.shape
    if t.stride(3) != 1 or t.data_ptr() % 16:
        return False
    if order == "groups":
        return t.stride(1) == features and (t.stride(2) == m * features or groups == 1)
    if order != "tokens" or t.stride(2) != features:
        return False
    apart = t.stride(1) * t.element_size() % 16 == 0 and t.stride(1) >= groups * features
    return apart or m == 1


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


def source_of(
    file: str, activation: str, macros: Mapping[str, int], more: tuple[str, ...] = ()
) -> str:
    """A kernel's complete CUDA C++ source behind its macros; ``more`` headers come last."""
    acts = cuda_macros("tail" if macros["SIZE"] == 4 else "fast", activation)
    named = {**acts, "NARROW": 1, **macros}
    text = "".join(f"#define {name} {value}\n" for name, value in named.items())
    parts: tuple[str | Path, ...] = (
        "packed_groups_instructions.h",
        "packed_groups_tiles.h",
        CUDA_HEADER,
        *more,
    )
    return text + WORDS.read_text() + "".join((_HERE / p).read_text() for p in (*parts, file))


def reason_not(p: Problem, orders: tuple[str, ...] = ORDERS) -> str | None:
    """Why no kernel for these orders can serve a Problem, whatever its groups' sizes, or None."""
    if p.device != "cuda":
        return "its kernel runs on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "its kernel is written for compute capability 9.0"
    if (p.option("x"), p.option("w")) != ("dense", "dense") or p.option("order") not in orders:
        return "serves dense tensors" + (", tokens or groups first" if orders == ORDERS else "")
    if max(p.dim("M"), p.dim("G") * max(p.dim("K"), p.dim("N"))) > _MOST:
        return f"sizes must stay below {_MOST}"
    return None


def no_strip(p: Problem) -> str:
    """The sentence for a Problem whose groups no configuration takes."""
    m, groups, k, n = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    side = f"{m} tokens of a group" if p.option("order") == "groups" else f"{groups} groups"
    return f"no strip of {side}, {k} to {n} features, fits: 16 bytes, registers"


@lru_cache(maxsize=16)
def is_slow(device: torch.device) -> bool:
    """Whether a GPU's memory slows down where too much is asked of it at a time."""
    return device.type == "cuda" and 0.0 < memory_rate(device) < _SLOW_MEMORY


def stages_for(device: torch.device, stages: int, size: int) -> int:
    """Stages of so many bytes, at most ``stages`` and at least 2, as the memory takes them."""
    return max(2, min(stages, UNDER_WAY // size)) if is_slow(device) else stages


def later_for(device: torch.device, plain: bool) -> float:
    """How much later than equal shares whole chunks of strips may end; ``plain``: nothing but x and
    what is computed of it are read."""
    return _AS_SOON_SLOW if plain and is_slow(device) else _AS_SOON


class Split:
    """How strips * tiles tiles are shared out: block b takes ``each`` of them, or one more.

    Whole chunks of strips, so that each block has tiles of one strip, where these end no later than
    ``later`` times equal shares.

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
        least: int = LEAST_TILES,
        later: float = _AS_SOON,
    ) -> None:
        total = strips * tiles
        whole = at_once // strips * strips
        if whole and -(-total // whole) <= later * -(-total // at_once):
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
