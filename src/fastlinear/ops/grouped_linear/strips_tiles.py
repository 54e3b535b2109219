"""Tiles of strips of narrow groups as the copy engine moves them: ``strips_tiles.h``."""

from __future__ import annotations

import torch

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.ops.common import cuda_driver as driver

ROWS = 32
"""Tokens of a tile."""
SIZE = 2
"""Bytes of a number."""
SWIZZLED = 128
"""Bytes of a row of the copy engine's widest swizzle."""
_STEP = 1024  # bytes; swizzled tiles begin at multiples of it
_BOX = 256  # columns that one copy moves


def box_columns(columns: int) -> int:
    """Columns of the boxes that a strip is cut into: as few as can be, of whole 16 bytes."""
    if columns * SIZE % SWIZZLED == 0:
        return SWIZZLED // SIZE
    return next(c for c in range(_BOX, 0, -8) if columns % c == 0)


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
