"""Matrices of float32 as matrices of float16, by ``planes_split.cu``: one launch for a product or a
whole backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.families.linear.cuda.planes import (
    BIAS_KERNEL,
    SPLIT_KERNEL,
    SPLIT_THREADS,
    pitch,
    split_source,
)
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import BK
from fastlinear.kernels.cuda.prepared import Block, Plans, prepared

_SIDE_BYTES = 7 * 8
_MATRIX_BYTES = 3 * 8 + 2 * _SIDE_BYTES + 2 * 8 + 6 * 4
_MOST_MATRICES = 3
_SPLIT_BYTES = _MOST_MATRICES * _MATRIX_BYTES + 8
_BIAS_COLUMNS = 32


class Planes(NamedTuple):
    """A matrix (rows, columns) of float32 as matrices of float16, one way.

    Attributes:
        high, low: of numbers that are not small beside others of their segment.
        small_high, small_low: of those that are; not written where there are none.
        scales: (segments of 64 along K, rows or columns and more); -1 where there are no planes.
        small: (segments, lines / 64), whether there are small numbers.
        numbers: the matrix, or dy of the gradient that it is.
        saved: what the activation of that saved; None of a matrix.
        by_columns: whether K is the dimension of rows.
        activation: of the gradient.
    """

    high: Tensor
    low: Tensor
    small_high: Tensor
    small_low: Tensor
    scales: Tensor
    small: Tensor
    numbers: Tensor
    saved: Tensor | None
    by_columns: bool
    activation: str = "none"

    @property
    def made(self) -> tuple[Tensor, ...]:
        """What is split into."""
        planes = self.high, self.low, self.small_high, self.small_low
        return *planes, self.scales, self.small

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of it."""
        return *self.made, self.numbers, self.saved


TENSORS, _OF_SIDE = 8, 6  # of Planes; of these, made


class Source(NamedTuple):
    """What is to be split.

    Attributes:
        numbers: (rows, columns) of float32.
        by_rows, by_columns: which ways; by columns a scale belongs to 64 numbers of a column.
        saved: of a gradient dy act'(saved), with dy the numbers; (rows, columns).
        activation: its activation.
        summed: whether its sums over rows are wanted.
    """

    numbers: Tensor
    by_rows: bool = False
    by_columns: bool = False
    saved: Tensor | None = None
    activation: str = "none"
    summed: bool = False

    def part(self, of: tuple[slice, slice]) -> Source:
        """Some of its rows and columns."""
        saved = None if self.saved is None else self.saved[of]
        return self._replace(numbers=self.numbers[of], saved=saved)


plans: Plans[_SplitPlan] = Plans()


def _side_by_side(source: Source) -> tuple[Source, bool]:
    """A matrix whose rows are side by side in memory: itself, turned, or a copy; whether turned."""
    t = source.numbers
    if source.saved is None and not source.summed and t.stride(0) == 1 < t.stride(1) and len(t) > 1:
        return Source(t.t(), source.by_columns, source.by_rows), True
    saved = source.saved
    dense = source._replace(numbers=_dense(t), saved=None if saved is None else _dense(saved))
    return dense, False


def _dense(t: Tensor) -> Tensor:
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def split(
    sources: Sequence[Source], bias: Tensor | None = None
) -> tuple[list[Planes], Tensor | None]:
    """Planes of up to three matrices in one launch, by rows before by columns; a bias' gradient.

    Args:
        sources: what to split; turned where columns are side by side in memory. The first one may
            be a gradient.
        bias: memory for its sums.
    """
    found = [_side_by_side(source) for source in sources]
    laid = [one for one, _ in found]
    first = laid[0]
    made: list[Planes] = []
    given: list[Tensor | None] = []
    for one, turned in found:
        ways = (False,) * one.by_rows + (True,) * one.by_columns
        sides = [_side(one, by_columns) for by_columns in ways]
        made += reversed(sides) if turned else sides
        padding = (None,) * _OF_SIDE
        by_rows = sides[0].made if one.by_rows else padding
        by_columns = sides[-1].made if one.by_columns else padding
        given += [one.numbers, one.saved, *by_rows, *by_columns]
    sums = None
    if first.summed:
        rows, columns = first.numbers.shape
        sums = first.numbers.new_empty(_up(rows, BK) // BK, columns)
        bias = first.numbers.new_empty(columns) if bias is None else bias
    device = first.numbers.device.index

    def plan() -> _SplitPlan:
        with compiled.current(device):
            return _SplitPlan(laid, device)

    plans.of((device, *map(_facts, laid)), plan).run(*given, sums, bias)
    return made, bias


def _facts(source: Source) -> tuple[object, ...]:
    numbers, *ways, saved, activation, summed = source
    kept = None if saved is None else (saved.stride(0), saved.data_ptr() % 16)
    lie = numbers.shape, numbers.stride(0), numbers.data_ptr() % 16
    return (*lie, *ways, kept, activation, summed)


def _side(source: Source, by_columns: bool) -> Planes:
    t = source.numbers
    rows, columns = t.shape
    planes = t.new_empty(4, rows, pitch(columns), dtype=torch.float16)[:, :, :columns]
    k, lines = (rows, columns) if by_columns else (columns, rows)
    segments, blocks = _up(k, BK) // BK, _up(lines, BK) // BK
    scales = t.new_empty(segments, blocks * BK)
    small = t.new_empty(segments, blocks, dtype=torch.int32)
    high, low, small_high, small_low = planes
    of = (t, source.saved, by_columns, source.activation)
    return Planes(high, low, small_high, small_low, scales, small, *of)


class _SplitPlan:
    """Launches of ``planes_split.cu``. Tensors: of each matrix numbers, saved and what is made by
    rows and by columns; sums, the bias' gradient."""

    def __init__(self, sources: Sequence[Source], device: int) -> None:
        text = split_source(sources[0].activation)
        block, first = Block(_SPLIT_BYTES), 0
        each, last = 2 + 2 * _OF_SIDE, len(sources) * (2 + 2 * _OF_SIDE)
        for i, one in enumerate(sources):
            t, saved = one.numbers, one.saved
            rows, columns = t.shape
            wide = all(
                u is None or (u.data_ptr() % 16 == 0 and (u.stride(0) % 4 == 0 or rows == 1))
                for u in (t, saved)
            )
            across = _up(columns, BK) // BK
            at, tensor = _MATRIX_BYTES * i, each * i
            for j in range(2):
                block.address(at + 8 * j, tensor + j, 15)
            if one.summed:
                block.address(at + 16, last)
            for way, (wanted, lines) in enumerate(((one.by_rows, rows), (one.by_columns, columns))):
                side, of_side = at + 24 + _SIDE_BYTES * way, tensor + 2 + _OF_SIDE * way
                for j in range(_OF_SIDE if wanted else 0):
                    block.address(side + 8 * j, of_side + j, 15)
                block.numbers(side + 8 * _OF_SIDE, "q", _up(lines, BK))
            strides = t.stride(0), 0 if saved is None else saved.stride(0)
            table = rows, columns, pitch(columns), int(wide), first, across
            block.numbers(at + 24 + 2 * _SIDE_BYTES, "2q6i", *strides, *table)
            first += _up(rows, BK) // BK * across
        block.numbers(_MOST_MATRICES * _MATRIX_BYTES, "i", len(sources))
        self._runs = [prepared(text, SPLIT_KERNEL, block, SPLIT_THREADS, first, device)]
        if sources[0].summed:
            rows, columns = sources[0].numbers.shape
            block = Block(24)
            block.address(0, last)
            block.address(8, last + 1)
            block.numbers(16, "2i", _up(rows, BK) // BK, columns)
            blocks = -(-columns // _BIAS_COLUMNS)
            self._runs.append(prepared(text, BIAS_KERNEL, block, SPLIT_THREADS, blocks, device))

    def run(self, *given: Tensor | None) -> None:
        """All launches."""
        for launch in self._runs:
            launch(*given)
