"""Signs of outputs, a bit each: all that the derivatives of relu and leaky_relu ask of y.

``packed_groups``, ``weight_stationary``, and channels first ``triton``, write them beside y in
16-bit dtypes, and the backwards ``packed_groups``, ``wide`` and ``triton`` read them in place of y,
of which they are a sixteenth. Those of ``triton`` are ``Channels``, of ``weight_stationary``
``Boxes``; those of ``packed_groups`` lie as ``packed_groups_sign_mask.h`` says: uint8 (planes,
tiles, units, 32), of which a unit is 8 columns of a tile of 32 rows. Tokens first there is one
plane of M rows and G·N columns; groups first a plane for each group, whose rows are P tokens, one
behind the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.cuda.packed_groups_backward_config import packed_backward_config
from fastlinear.families.grouped.cuda.packed_groups_config import packed_config
from fastlinear.families.grouped.cuda.packed_groups_tiles import ROWS, SIZE, side_by_side
from fastlinear.families.grouped.triton import config, tensors

SIGNS = "signs"
"""What is kept for a backward, beside what ``Activation.saved`` names."""
ACTIVATIONS = ("relu", "leaky_relu")
"""Whose derivatives ask for signs alone."""
_COLUMNS = 8  # of a unit
_OUTPUTS = 32  # of four units channels first
_BOX = 64


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
    def of(cls, sign_mask: Tensor, order: str, m: int, groups: int, n: int) -> Place:
        """Where such signs are."""
        return cls(
            order, m, groups, n, sign_mask.shape[2] * _COLUMNS // n if order == "groups" else 1
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the tensor of signs, uint8."""
        planes, rows, columns = self._rows
        return planes, -(-rows // ROWS), columns // _COLUMNS, ROWS

    def packed(self, y: Tensor, activation: str) -> Tensor:
        """The signs of y (1, M, G, N), by PyTorch's own ops; NaN is positive for relu."""
        positive = _positive(y, activation)
        planes, tiles, units, _ = self.shape
        rows = layouts.dense(positive, self.order).permute(*self._axes).reshape(self._rows)
        padding = tiles * ROWS - rows.shape[1]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
        bits = rows.view(planes, tiles, 4, 8, units, 4, 2).permute(0, 1, 4, 3, 5, 6, 2)
        packed = (bits.to(torch.int32) * _weights(y.device)).sum((-2, -1))
        return packed.to(torch.uint8).reshape(self.shape)

    def unpacked(self, sign_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(1, M, G, N) in its order: 1 where positive, else 0. The activation's derivative has the
        same values there as at y."""
        planes, rows, columns = self._rows
        tiles, units = sign_mask.shape[1:3]
        bytes_ = sign_mask.view(planes, tiles, units, 8, 4, 1, 1).to(torch.int32)
        bits = (bytes_ & _weights(sign_mask.device)).ne(0).permute(0, 1, 6, 3, 2, 4, 5)
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


class Channels(NamedTuple):
    """Where ``triton`` leaves the signs of y (B, L, G, N) that lies channels first: uint8 (B, G,
    units, L), of which unit 4 i + q has bit 2 j + e of output 32 i + 8 j + 2 q + e. Bits of outputs
    from N on say nothing."""

    batch: int
    length: int
    groups: int
    n: int

    @classmethod
    def of(cls, sign_mask: Tensor, n: int) -> Channels:
        """Where such signs are."""
        batch, groups, _, length = sign_mask.shape
        return cls(batch, length, groups, n)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the tensor of signs, uint8."""
        return self.batch, self.groups, -(-self.n // _OUTPUTS) * 4, self.length

    def like_rows(self) -> Tensor:
        """A tensor without memory that lies as ``rows`` of signs do."""
        return self.rows(torch.empty(self.shape, dtype=torch.uint8, device="meta"))

    @staticmethod
    def rows(sign_mask: Tensor) -> Tensor:
        """Signs as (B, L, G, units)."""
        return sign_mask.permute(0, 3, 1, 2)

    def packed(self, y: Tensor, activation: str) -> Tensor:
        """The signs of y (B, L, G, N), by PyTorch's own ops; NaN is positive for relu."""
        units = self.shape[2]
        positive = _positive(y, activation)
        bits = torch.nn.functional.pad(positive, (0, 8 * units - self.n))
        bits = bits.view(*y.shape[:3], units // 4, 4, 4, 2).transpose(-3, -2)
        packed = (bits.to(torch.int32) << self._places(y.device)).sum((-2, -1))
        return packed.to(torch.uint8).flatten(-2).permute(0, 2, 3, 1).contiguous()

    def unpacked(self, sign_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, L, G, N) channels first: 1 where positive, else 0. The activation's derivative has
        the same values there as at y."""
        units = self.rows(sign_mask).unflatten(-1, (-1, 4))[..., None, None].to(torch.int32)
        bits = units >> self._places(sign_mask.device) & 1
        wide = bits.transpose(-3, -2).flatten(3)[..., : self.n].to(dtype)
        return layouts.dense(wide, "channels")

    @staticmethod
    def _places(device: torch.device) -> Tensor:
        """(4, 2): of a unit's bits."""
        return torch.arange(8, dtype=torch.int32, device=device).view(4, 2)


class Boxes(NamedTuple):
    """Where ``weight_stationary`` leaves the signs of y (B, L, G, N), in any order, for ``wide``:
    uint8 (B, G, tiles, boxes, 4, 32, 4), a tile 64 tokens, a box 64 outputs. Words of 4 bytes are
    those of a warp's lanes, lane 4 t + q that of tokens t and t + 8 of 16: byte 2 i + e has bit 2 j
    + h of token 8 h + t, output 32 i + 8 j + 2 q + e. Bits beyond L and N say nothing."""

    batch: int
    length: int
    groups: int
    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor of signs, uint8."""
        tiles, boxes = -(-self.length // _BOX), -(-self.n // _BOX)
        return self.batch, self.groups, tiles, boxes, 4, 32, 4

    def packed(self, y: Tensor, activation: str) -> Tensor:
        """The signs of y (B, L, G, N), by PyTorch's own ops; NaN is positive for relu."""
        batch, groups, tiles, boxes = self.shape[:4]
        wide = (0, boxes * _BOX - self.n, 0, 0, 0, tiles * _BOX - self.length)
        rows = torch.nn.functional.pad(_positive(y, activation), wide)
        # tile, warp, h, t, group, box, i, j, q, e
        bits = rows.reshape(batch, tiles, 4, 2, 8, groups, boxes, 2, 4, 4, 2).to(torch.int32)
        bits = bits.permute(0, 5, 1, 6, 2, 4, 9, 7, 10, 8, 3)
        found = (bits << self._places(y.device)).sum((-2, -1)).to(torch.uint8)
        return found.reshape(self.shape)

    def unpacked(self, sign_mask: Tensor, dtype: torch.dtype, order: str) -> Tensor:
        """(B, L, G, N) in that order: 1 where positive, else 0. The activation's derivative has the
        same values there as at y."""
        batch, groups, tiles, boxes = self.shape[:4]
        bytes_ = sign_mask.view(batch, groups, tiles, boxes, 4, 8, 4, 2, 2, 1, 1).to(torch.int32)
        bits = bytes_ >> self._places(sign_mask.device) & 1
        rows = bits.permute(0, 2, 4, 10, 5, 1, 3, 7, 9, 6, 8)
        wide = rows.reshape(batch, tiles * _BOX, groups, boxes * _BOX)
        return layouts.dense(wide[:, : self.length, :, : self.n].to(dtype), order)

    @staticmethod
    def _places(device: torch.device) -> Tensor:
        """(4, 2): of a byte's bits."""
        return torch.arange(8, dtype=torch.int32, device=device).view(4, 2)


AnyPlace = Place | Channels | Boxes


def place_for(
    x: Tensor, weight: Tensor, activation: str, order: str, forward: str, backward: str
) -> AnyPlace | None:
    """Where the backends of these names keep signs, or None where they do not.

    Args:
        x: (B, L, G, K).
        weight: (G, N, K).
        order: of y in memory.
    """
    if activation not in ACTIVATIONS or x.element_size() != SIZE:
        return None
    batch, m, groups, k = x.shape
    n = weight.shape[1]
    if (forward, backward) == ("triton", "triton"):
        found = order == "channels" and _one_pass(x, n)
        return Channels(batch, m, groups, n) if found else None
    if (forward, backward) == ("weight_stationary", "wide"):
        return Boxes(batch, m, groups, n)
    if (forward, backward) != ("packed_groups", "packed_groups") or batch != 1:
        return None
    p = _rows_of(order, m, groups, k, n)
    return None if p is None else Place(order, m, groups, n, p)


def _rows_of(order: str, m: int, groups: int, k: int, n: int) -> int | None:
    """Tokens of a row, as ``Place.p``; None where a direction has no configuration for it."""
    side = side_by_side(order, m, groups)
    backward = packed_backward_config(side, k, n, sign_mask=True, order=order)
    if backward is None:
        return None
    together = backward.groups if order == "groups" else None
    if packed_config(side, k, n, False, sign_mask=True, groups=together, order=order) is None:
        return None
    return together or 1


def _one_pass(x: Tensor, n: int) -> bool:
    """Whether ``triton`` has kernels that write and read signs of y (B, L, G, n)."""
    batch, length, groups, k = x.shape
    sizes = batch * length, groups, k, n, SIZE
    facts = tensors.units_of(x.device), tensors.capability_of(x.device)
    if not config.padded(n) >= _OUTPUTS or max(k, n) > config.MOST_SIGNS:
        return False
    if config.product_config(*sizes, *facts).block_k:
        return False
    return config.backward_config(*sizes, *facts, "relu", sign_mask=True) is not None


def is_sign_mask(saved: Tensor | None) -> bool:
    """Whether what was saved are signs."""
    return saved is not None and saved.dtype is torch.uint8


def _positive(y: Tensor, activation: str) -> Tensor:
    """Where the activation's derivative is 1."""
    return ~(y <= 0) if activation == "relu" else y > 0


def _weights(device: torch.device) -> Tensor:
    """(2, 4): of a byte's bits, by column and row."""
    return (1 << torch.arange(8, dtype=torch.int32, device=device)).view(2, 4)
