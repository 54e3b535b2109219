"""Signs of outputs, a bit each: all that the derivatives of relu and leaky_relu ask of y.

``strips`` writes them beside y in 16-bit dtypes, and its backward reads them in place of y, of
which they are a sixteenth. How they lie is what ``strips_signs.h`` says: uint8 (planes, tiles,
units, 32), of which a unit is 8 columns of a tile of 32 rows. Tokens first there is one plane of M
rows and G·N columns; groups first a plane for each group, whose rows are P tokens, one behind the
other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.strips_backward_config import strips_backward_config
from fastlinear.ops.grouped_linear.strips_config import strips_config
from fastlinear.ops.grouped_linear.strips_tiles import ROWS, SIZE, side_by_side

SIGNS = "signs"
"""What is kept for a backward, beside what ``Activation.saved`` names."""
ACTIVATIONS = ("relu", "leaky_relu")
"""Whose derivatives ask for signs alone."""
_COLUMNS = 8  # of a unit


class Place(NamedTuple):
    """Where the signs of y (1, M, G, N) are.

    Attributes:
        order: of y in memory, ``"tokens"`` or ``"groups"``.
        m, groups, n: M, G, N; rows are whole units.
        p: tokens of a row where groups come first.
    """

    order: str
    m: int
    groups: int
    n: int
    p: int

    @classmethod
    def of(cls, signs: Tensor, order: str, m: int, groups: int, n: int) -> Place:
        """Where such signs are."""
        return cls(order, m, groups, n, signs.shape[2] * _COLUMNS // n if order == "groups" else 1)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the tensor of signs, uint8."""
        planes, rows, columns = self._rows
        return planes, -(-rows // ROWS), columns // _COLUMNS, ROWS

    def packed(self, y: Tensor, activation: str) -> Tensor:
        """The signs of y (1, M, G, N), by PyTorch's own ops; NaN is positive for relu."""
        positive = ~(y <= 0) if activation == "relu" else y > 0
        planes, tiles, units, _ = self.shape
        rows = layouts.dense(positive, self.order).permute(*self._axes).reshape(self._rows)
        padding = tiles * ROWS - rows.shape[1]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
        bits = rows.view(planes, tiles, 4, 8, units, 4, 2).permute(0, 1, 4, 3, 5, 6, 2)
        packed = (bits.to(torch.int32) * _weights(y.device)).sum((-2, -1))
        return packed.to(torch.uint8).reshape(self.shape)

    def unpacked(self, signs: Tensor, dtype: torch.dtype) -> Tensor:
        """(1, M, G, N) in its order: 1 where positive, else 0. The activation's derivative has the
        same values there as at y."""
        planes, rows, columns = self._rows
        tiles, units = signs.shape[1:3]
        bytes_ = signs.view(planes, tiles, units, 8, 4, 1, 1).to(torch.int32)
        bits = (bytes_ & _weights(signs.device)).ne(0).permute(0, 1, 6, 3, 2, 4, 5)
        wide = bits.reshape(planes, tiles * ROWS, columns)[:, :rows].to(dtype)
        if self.order == "groups":
            return wide.reshape(1, self.groups, self.m, self.n).permute(0, 2, 1, 3)
        return wide.reshape(1, self.m, self.groups, self.n)

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Planes, rows of each, columns."""
        if self.order == "groups":
            return self.groups, self.m // self.p, self.p * self.n
        return 1, self.m, self.groups * self.n

    @property
    def _axes(self) -> tuple[int, int, int, int]:
        return (0, 2, 1, 3) if self.order == "groups" else (0, 1, 2, 3)


def place_for(
    x: Tensor, weight: Tensor, activation: str, order: str, forward: str, backward: str
) -> Place | None:
    """Where the backends of these names keep signs, or None where they do not.

    Args:
        x: (B, L, G, K).
        weight: (G, N, K).
        order: of y in memory.
    """
    if (forward, backward) != ("strips", "strips") or activation not in ACTIVATIONS:
        return None
    batch, m, groups, k = x.shape
    n = weight.shape[1]
    if batch != 1 or x.element_size() != SIZE:
        return None
    p = _rows_of(order, m, groups, k, n)
    return None if p is None else Place(order, m, groups, n, p)


def has_place(order: str, m: int, groups: int, k: int, n: int) -> bool:
    """Whether ``strips``, forward and backward, have one place for the signs of 16-bit outputs."""
    return _rows_of(order, m, groups, k, n) is not None


def _rows_of(order: str, m: int, groups: int, k: int, n: int) -> int | None:
    """Tokens of a row, as ``Place.p``; None where the directions do not agree."""
    side = side_by_side(order, m, groups)
    first = strips_config(side, k, n, False, signs=True)
    second = strips_backward_config(side, k, n, signs=True)
    if first is None or second is None:
        return None
    if order != "groups":
        return 1
    return first.groups if first.groups == second.groups else None


def are_signs(saved: Tensor | None) -> bool:
    """Whether what was saved are signs."""
    return saved is not None and saved.dtype is torch.uint8


def _weights(device: torch.device) -> Tensor:
    """(2, 4): of a byte's bits, by column and row."""
    return (1 << torch.arange(8, dtype=torch.int32, device=device)).view(2, 4)
