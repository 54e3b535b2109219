"""Column sums in two stages of fixed order: of a program's rows, then of all programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.kernels.row_tiles import RowTiles
from fastlinear.kernels.triton.launch import Launch
from fastlinear.kernels.triton.sums_kernels import _sum_rows_kernel

_SUMMED_ROWS = 512  # that a program of the second stage adds up at once


def sum_of_rows(
    rows: int, n: int, device: torch.device, *, step: int = 1, twice: bool = False
) -> Launch:
    """The launch that adds up part, (ROWS, N) in float32, over ROWS.

    Call it with part, a result (N,), whose dtype the sums are rounded to, and another or None.

    Args:
        rows, n: ROWS and N.
        device: where part is.
        step: columns of a result from one to the next.
        twice: whether part is (2, ROWS, N), and there is another result.
    """
    down = min(_SUMMED_ROWS, 1 << (rows - 1).bit_length())
    across = max(8, _SUMMED_ROWS // down)
    grid = (-(-n // across), 2) if twice else (-(-n // across),)
    return Launch(_sum_rows_kernel, grid, (rows, n, step, down, across), device, warps=4)


class ColumnSums:
    """Memory for the column sums of a pass's programs, and the launch that adds them up.

    Args:
        tiles: the pass's, over (M, N).
        n: N.
        chunk_rows: rows of a program, as ``tiles`` counts them.
        device: where the pass runs.
    """

    __slots__ = ("_device", "_part", "_scratch", "_sum")

    def __init__(self, tiles: RowTiles, n: int, chunk_rows: int, device: torch.device) -> None:
        chunks = -(-tiles.rows // chunk_rows)
        parts = chunks * tiles.fold // tiles.added
        self._device = device
        self._scratch = (chunks, tiles.columns) if tiles.added > 1 else None
        self._part = (parts, n) if parts > 1 else None
        self._sum = sum_of_rows(parts, n, device) if parts > 1 else None

    def memory(self, out: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What a pass writes its sums to, and scratch memory; None where it needs none."""
        if out is None:
            return None, None
        return self._empty(self._part) if self._part else out, self._empty(self._scratch)

    def run(self, part: Tensor | None, out: Tensor | None) -> None:
        """Add up what ``memory`` gave, to out (N,)."""
        if self._sum is not None and part is not None and out is not None:
            self._sum(part, out, None)

    def _empty(self, shape: tuple[int, int] | None) -> Any:
        return (
            None if shape is None else torch.empty(shape, dtype=torch.float32, device=self._device)
        )


def constants(tiles: RowTiles, dense: bool) -> tuple[int, int, bool, int, int]:
    """``store_sums``'s fold, a kernel's UNIT and DENSE, ``store_sums``'s FOLD and EACH."""
    each = tiles.columns // tiles.added
    wide = 1 << (tiles.added - 1).bit_length(), 1 << (each - 1).bit_length()
    return tiles.added, tiles.unit, dense, *wide


def units_of(device: torch.device) -> int:
    """Multiprocessors; the CPU interpreter counts as one, so that programs walk several tiles."""
    return device_facts(device).units if device.type == "cuda" else 1
