"""Facts of tensors that the Triton launches of grouped_linear are made for, and their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.families.grouped import layout as layouts

MAX_PLANS = 4096
_WIDEST = 16  # elements that must divide a stride for Triton to load 16 bytes at once
_MOST_ROWS = 256  # of a tile
_WASTE = 1.25  # padding of tiles from which they run across batch entries


class Tiles:
    """How block_m tokens at a time cover (B, L).

    Attributes:
        across: whether a tile may span batch entries.
        tiles: tiles of one group.
        shape: (B, L, tiles of a batch entry), as the kernels take it.
    """

    __slots__ = ("across", "shape", "tiles")

    def __init__(self, x: Tensor, block_m: int) -> None:
        batch, length = x.shape[:2]
        within = -(-length // block_m)
        self.across = batch > 1 and within * block_m > _WASTE * length
        self.tiles = -(-batch * length // block_m) if self.across else batch * within
        self.shape = (batch, length, within)


def strides_of(t: Tensor | None) -> tuple[tuple[int, ...], tuple[int, str, int]]:
    """(counts, (ALIGN, UNIT, FIXED)): strides as the kernels take them: batch, row, group, col
    or, of a weight, group, row, col.

    ALIGN is the largest power of two, up to 16, that divides every stride but the unit one. FIXED
    is the row stride, but where positions are contiguous: strides change with their number.
    """
    if t is None:
        return (0,) * 4, (1, "", 0)
    strides = [0 if size == 1 else s for size, s in zip(t.shape, t.stride(), strict=True)]
    unit, place = "", -1
    if t.shape[-1] == 1 or strides[-1] == 1:
        unit, place = "col", len(strides) - 1
    elif strides[1] == 1:
        unit, place = "row", 1
    align = _WIDEST
    while any(s % align for i, s in enumerate(strides) if i != place):
        align //= 2
    counts = tuple(1 if i == place else s // align for i, s in enumerate(strides))
    return counts, (align, unit, strides[1] if unit == "col" else 0)


def arguments(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The counts of all tensors, then their constants, as the kernels take them."""
    found = [strides_of(t) for t in tensors]
    counts = (number for counts, _ in found for number in counts)
    return (*counts, *(fact for _, facts in found for fact in facts))


def facts_of(*tensors: Tensor | None) -> tuple[Any, ...]:
    """All that a launch is specialised to, of every tensor."""
    facts = [
        None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() & 15) for t in tensors
    ]
    first = tensors[0]
    assert first is not None
    return (first.device, *facts)


def far_apart(*tensors: Tensor | None) -> bool:
    """Whether the rows of a tile, or a row's columns, span more than 32-bit offsets reach."""
    given = [t for t in tensors if t is not None]
    return any(
        max(rows * t.stride(1), t.shape[-1] * t.stride(-1)) >= 2**31
        for t in given
        for rows in [min(t.shape[1], _MOST_ROWS) if t.dim() == 4 else t.shape[1]]
    )


def units_of(device: torch.device) -> int:
    """Multiprocessors; the CPU interpreter counts as one, so that programs walk several tiles."""
    return device_facts(device).units if device.type == "cuda" else 1


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability; the CPU interpreter counts as 9.0."""
    return device_facts(device).capability if device.type == "cuda" else (9, 0)


def empty(shape: Any, order: str, like: Tensor) -> Tensor:
    """Uninitialised (B, L, G, features), dense in that order of memory."""
    return layouts.empty(shape, order, like, _dtype(like))


def vector(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised dW or db."""
    return torch.empty(shape, dtype=_dtype(like), device=like.device)


def workspace(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised float32 memory."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def rounded(t: Tensor, like: Tensor) -> Tensor:
    """The result in the dtype of ``like`` (a no-op on a GPU)."""
    return t if t.dtype is like.dtype else t.to(like.dtype)


def _dtype(like: Tensor) -> torch.dtype:
    """The CPU interpreter truncates to bfloat16, so its results are float32 first."""
    narrow = like.device.type == "cpu" and like.dtype is torch.bfloat16
    return torch.float32 if narrow else like.dtype
