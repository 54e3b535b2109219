"""How the Triton kernels of a chain are launched and its widths laid out. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["WholeConfig", "backward_config", "forward_config", "grads_config", "layout", "parts_of"]

_MIN_BLOCK = 16
_RESIDENT_TILES = 5  # of 128 by 128 16-bit numbers, in a Hopper multiprocessor


@dataclass(frozen=True)
class WholeConfig:
    """How one chain kernel is launched.

    Attributes:
        block_m: rows a program takes at a time, a power of two of at least 16.
        warps, stages: warps of a program, depth of the load pipeline.
        resident: how many of the weights' tiles are loaded once and kept on the chip.
        ahead: tiles between the load of a weight's tile and its use.
        per_unit: programs on each multiprocessor; 0 gives every row block a program of its own.
        chunk: largest part in which a width is held, a power of two of at least 16.
    """

    block_m: int
    warps: int
    stages: int = 1
    resident: int = 0
    ahead: int = 1
    per_unit: int = 0
    chunk: int = 128


def forward_config(
    M: int, widths: tuple[int, ...], dtype: torch.dtype, units: int, capability: tuple[int, int]
) -> WholeConfig:
    """The configuration of the forward of M rows through layers of these widths."""
    wide = max(widths) > 64
    if dtype.itemsize == 4:
        block_m = _block_rows(M, units, 32)
        few = block_m == _MIN_BLOCK
        return WholeConfig(block_m, 8 if wide or few else 4, ahead=int(few), chunk=64)
    block_m = _block_rows(M, units, 128)
    if not wide and block_m < 64:
        return WholeConfig(block_m, 4, ahead=2)
    if not wide:  # masks of weights that begin anywhere take registers
        masked = any(n % 16 for n in widths[1:-1])
        return WholeConfig(128, 8, ahead=0) if masked else WholeConfig(64, 4, ahead=0)
    if block_m == 128 and capability[0] == 9:
        # One program fills a multiprocessor's registers; its shared memory holds weights
        return WholeConfig(block_m, 8, 1, _RESIDENT_TILES, 0, 1)
    if _has_narrow_parts(widths):  # weights of parts of 128 would not fit the registers
        return WholeConfig(min(block_m, 32), 4, ahead=0, chunk=64)
    if block_m < 64:
        return WholeConfig(block_m, 8, ahead=1)
    return WholeConfig(block_m, block_m // 16, ahead=0, chunk=64)


def backward_config(M: int, widths: tuple[int, ...], dtype: torch.dtype, units: int) -> WholeConfig:
    """The configuration of the backward's data chain."""
    wide = max(widths) > 64
    if dtype.itemsize == 4:
        return WholeConfig(_block_rows(M, units, 32), 8 if wide else 4, ahead=0, chunk=64)
    block_m = _block_rows(M, units, 32 if _has_narrow_parts(widths) else 64)
    return WholeConfig(block_m, 4, ahead=1, chunk=64)


def _has_narrow_parts(widths: tuple[int, ...]) -> bool:
    """Whether widths have parts below 64 columns.

    From 64 rows on Triton multiplies 16 bits by Hopper's wgmma, and several such products, one of
    them narrow, may be wrong or read memory that is not theirs (3-128-100-1 with 70,001 rows,
    Triton 3.6, H200; triton-lang/triton#11366). By 32 rows they are right.
    """
    return any(min(parts_of(width, 64)) < 64 for width in widths)


def grads_config(dtype: torch.dtype) -> WholeConfig:
    """The configuration of the weight gradients' product."""
    if dtype.itemsize == 4:
        return WholeConfig(32, 4, 3, per_unit=2, chunk=64)
    return WholeConfig(64, 4, 3, per_unit=2)


def _block_rows(M: int, units: int, largest: int) -> int:
    """Rows of a program: few where that puts more multiprocessors to work."""
    block = _MIN_BLOCK
    while block < largest and 2 * block * units < M:
        block *= 2
    return block


def parts_of(width: int, chunk: int) -> tuple[int, ...]:
    """Sizes of the parts that hold a width: ``chunk``, and a power of two for the rest."""
    whole, rest = divmod(width, chunk)
    padded = (max(_MIN_BLOCK, 1 << (rest - 1).bit_length()),) if rest else ()
    return (chunk,) * whole + padded


def layout(widths: tuple[int, ...], chunk: int, backward: bool) -> tuple[Any, ...]:
    """(LAYERS, WIDTHS, BLOCKS, PARTS, MAX_PARTS, TILES, STARTS) of a chain kernel."""
    blocks = tuple(parts_of(n, chunk) for n in widths)
    parts = tuple(map(len, blocks))
    layers = len(widths) - 1
    tiles: list[tuple[int, int, int]] = []
    starts = [0] * layers
    for i in reversed(range(layers)) if backward else range(layers):
        starts[i] = len(tiles)
        inner = [(i, n, k) for n in range(parts[i + 1]) for k in range(parts[i])]
        tiles += sorted(inner, key=lambda t: t[:0:-1]) if backward else inner
    return layers, widths, blocks, parts, max(parts), tuple(tiles), (*starts, len(tiles))
