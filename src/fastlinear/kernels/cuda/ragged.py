"""Where groups of rows lie whose sizes only the device knows: a table that a launch writes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import RAGGED_HEADER, WORDS
from fastlinear.kernels.cuda.prepared import Block, Plans, Prepared, prepared

RAGGED_BYTES = 8 + 4 * 4
"""Of the struct that tells them of it: its address, three numbers, and padding."""
_KERNEL, _THREADS = "ragged_table", 1024
_BLOCK, _TILE = 64, 128  # BLOCK_ROWS and TILE_ROWS of the header

_plans: Plans[Prepared] = Plans()


class Ragged(NamedTuple):
    """Groups of rows whose sizes only the device knows, as ``ragged_table.cu`` writes them.

    Attributes:
        table: of 32-bit integers.
        groups: how many.
        rows: of all groups, and behind them.
    """

    table: Tensor
    groups: int
    rows: int

    @property
    def most_blocks(self) -> int:
        """Blocks of 64 rows that copies of the groups' rows have at most."""
        return self.rows // _BLOCK + min(self.groups, self.rows)

    @property
    def most_tiles(self) -> int:
        """Tiles of 128 rows that there are at most; one more for rows of no group."""
        return self.rows // _TILE + min(self.groups, self.rows) + 1

    @property
    def facts(self) -> tuple[int, ...]:
        """The numbers that kernels are told."""
        return self.groups, self.most_tiles, self.most_blocks


def ragged(sizes: Tensor, rows: int, ordered: bool = False) -> Ragged:
    """Where groups lie, in one launch; sizes: (groups,), dense, of 32 or 64 bits, on the device.

    Sizes below 0 count as 0, and groups end where the rows do.

    Args:
        ordered: whether the table also has the groups in order, those of most rows first. More than
            256 groups stay as they are.
    """
    device = sizes.device.index
    found = Ragged(sizes, sizes.shape[0], rows)
    entries = 4 * (found.most_tiles + found.most_blocks) + 4 * (found.groups + 1)
    found = found._replace(table=sizes.new_empty(entries, dtype=torch.int32))

    def plan() -> Prepared:
        block = Block(8 + RAGGED_BYTES + 16)
        block.address(0, 0, sizes.itemsize - 1)
        block.address(8, 1, 15)
        block.numbers(16, "3i", *found.facts)
        block.numbers(8 + RAGGED_BYTES, "3i", rows, sizes.itemsize == 8, ordered)
        with compiled.current(device):
            return prepared(source(), _KERNEL, block, _THREADS, 1, device)

    _plans.of((device, sizes.itemsize, *found.facts, rows, ordered), plan)(sizes, found.table)
    return found


@cache
def source() -> str:
    """The complete CUDA C++ source of the launch."""
    files = WORDS, RAGGED_HEADER, RAGGED_HEADER.with_name("ragged_table.cu")
    return "#define IS_BF16 0\n" + "".join(file.read_text() for file in files)
