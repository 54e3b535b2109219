"""Matrices of float32 as matrices of float16, by ``planes_split.cu``: a launch for a product or a
whole backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.families.linear.cuda.planes import (
    BIAS_KERNEL,
    SPLIT_KERNEL,
    SPLIT_THREADS,
    Derivation,
    pitch,
    split_source,
    up,
)
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import BK
from fastlinear.kernels.cuda.prepared import Block, Plans, Prepared, prepared
from fastlinear.kernels.cuda.ragged import RAGGED_BYTES, Ragged

_SIDE_BYTES = 7 * 8
_MATRIX_BYTES = 4 * 8 + 2 * _SIDE_BYTES + 2 * 3 * 8 + 12 * 4
_MOST_MATRICES = 5
_OF_GROUPS = _MOST_MATRICES * _MATRIX_BYTES
_SPLIT_BYTES = _OF_GROUPS + RAGGED_BYTES + 8
_BIAS_COLUMNS = 32


class Source(NamedTuple):
    """What is to be split.

    Attributes:
        numbers: (rows, columns) of float32, or of groups (groups, rows, columns).
        ragged: the groups of rows, where only the device knows their sizes.
        by_rows, by_columns: which ways; by columns a scale belongs to 64 numbers of a column.
        derivation: how the matrix is derived from these numbers and the next two.
        saved, other: of that shape, where its derivation reads them.
        activation: of its derivation; one for all that are split together.
        sums: memory for its sums over rows, (columns,) or (groups, columns).
    """

    numbers: Tensor
    by_rows: bool = False
    by_columns: bool = False
    derivation: Derivation = Derivation.NONE
    saved: Tensor | None = None
    other: Tensor | None = None
    activation: str = "none"
    sums: Tensor | None = None
    ragged: Ragged | None = None

    @property
    def of_groups(self) -> bool:
        """Whether it is one of several groups, of which there may be one."""
        return self.ragged is not None or self.numbers.dim() == 3

    @property
    def groups(self) -> int:
        """How many there are."""
        if self.ragged is not None:
            return self.ragged.groups
        return self.numbers.shape[0] if self.numbers.dim() == 3 else 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of a group, of all where these are ragged, and columns."""
        rows, columns = self.numbers.shape[-2:]
        return rows, columns

    @property
    def rows_apart(self) -> int:
        """Rows of planes from the beginning of a group to that of the next."""
        rows, _ = self.sizes
        return up(rows, BK) if self.numbers.dim() == 3 else rows

    @property
    def rows_made(self) -> int:
        """Rows of planes."""
        if self.ragged is not None:
            return self.ragged.most_blocks * BK
        return self.groups * self.rows_apart

    @property
    def read(self) -> tuple[Tensor | None, ...]:
        """What it is derived from."""
        return self.numbers, self.saved, self.other

    def replaced(self, one: Callable[[Tensor], Tensor]) -> Source:
        """The same with another of each tensor that is read."""
        numbers, saved, other = (None if t is None else one(t) for t in self.read)
        assert numbers is not None
        return self._replace(numbers=numbers, saved=saved, other=other)

    def rows(self, rows: slice) -> Source:
        """Some of its rows."""
        return self.replaced(lambda t: t[rows])

    def columns(self, columns: slice) -> Source:
        """Some of its columns."""
        sums = None if self.sums is None else self.sums[columns]
        return self.replaced(lambda t: t[:, columns])._replace(sums=sums)


class Planes(NamedTuple):
    """A matrix (rows, columns) of float32 as matrices of float16, one way; of groups one below the
    other, each from a multiple of 64 rows on, with zeros between.

    Attributes:
        high, low: of numbers that are not small beside others of their segment.
        small_high, small_low: of those that are; not written where there are none.
        scales: (segments of 64 along K, lines: rows or columns and more); -1 where there are no
            planes.
        small: (segments, lines / 64): bits: 1 where there are small numbers, 2 where a block has
            one scale, 4 where its planes are ``shared``.
        source: the matrix.
        by_columns: whether K is the dimension of rows.
        shared: high and low by rows, of a matrix split both ways: where a block has one scale, they
            are those by columns, too.
    """

    high: Tensor
    low: Tensor
    small_high: Tensor
    small_low: Tensor
    scales: Tensor
    small: Tensor
    source: Source
    by_columns: bool
    shared: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def made(self) -> tuple[Tensor, ...]:
        """What is split into."""
        planes = self.high, self.low, self.small_high, self.small_low
        return *planes, self.scales, self.small

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of it."""
        return *self.made, *self.source.read, *self.shared


MADE, READ, SHARED = 6, 3, 2
TENSORS = MADE + READ + SHARED
"""Of Planes: those that are made, those that are read, and those of the other way."""

_GIVEN = READ + 2 + 2 * MADE  # tensors of a matrix

plans: Plans[_SplitPlan] = Plans()
Turns = tuple[tuple[int, int], ...]


def _side_by_side(source: Source) -> tuple[Source, bool]:
    """A matrix whose rows are side by side in memory: itself, turned, or a copy; whether turned."""
    t = source.numbers
    turned = t.stride(-2) == 1 < t.stride(-1) and t.shape[-2] > 1 and source.ragged is None
    if turned and source.derivation is Derivation.NONE and source.sums is None:
        ways = source.by_columns, source.by_rows
        return Source(t.transpose(-2, -1), *ways), True
    return source.replaced(_dense), False


def _dense(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def split(sources: Sequence[Source]) -> list[Planes]:
    """Planes of up to five matrices together, by rows before by columns, and their sums.

    Args:
        sources: what to split; turned where columns are side by side in memory. Those that are read
            from the same memory are best told one after the other.
    """
    found = [_side_by_side(source) for source in sources]
    laid = [one for one, _ in found]
    made: list[Planes] = []
    given: list[Tensor | None] = []
    for one, turned in found:
        ways = (False,) * one.by_rows + (True,) * one.by_columns
        sides = [_side(one, by_columns) for by_columns in ways]
        if len(sides) == 2:
            sides[1] = sides[1]._replace(shared=sides[0][:2])
        made += reversed(sides) if turned else sides
        padding = (None,) * MADE
        by_rows = sides[0].made if one.by_rows else padding
        by_columns = sides[-1].made if one.by_columns else padding
        t, parts = one.numbers, None
        if one.sums is not None:
            parts = t.new_empty(_blocks(one)[0], t.shape[-1])
        given += [*one.read, parts, one.sums, *by_rows, *by_columns]
    device = laid[0].numbers.device.index

    turns = _turns(laid)
    tables = {s.ragged.table for s in laid if s.ragged is not None}
    assert len(tables) < 2, "all groups are the same"
    given.append(next(iter(tables), None))

    def plan() -> _SplitPlan:
        with compiled.current(device):
            return _SplitPlan(laid, turns, device)

    plans.of((device, turns, *map(_facts, laid)), plan).run(*given)
    return made


def _facts(source: Source) -> tuple[object, ...]:
    ways, derivation = (source.by_rows, source.by_columns), (source.derivation, source.activation)
    read = [None if t is None else (*t.stride()[:-1], t.data_ptr() % 16) for t in source.read]
    more = source.sums is None, source.ragged and source.ragged.facts
    return (source.numbers.shape, *read, *ways, *derivation, *more)


def _side(source: Source, by_columns: bool) -> Planes:
    t, (_, columns) = source.numbers, source.sizes
    rows = source.rows_made
    planes = t.new_empty(4, rows, pitch(columns), dtype=torch.float16)[:, :, :columns]
    k, lines = (rows, columns) if by_columns else (columns, rows)
    segments, blocks = up(k, BK) // BK, up(lines, BK) // BK
    scales = t.new_empty(segments, blocks * BK)
    small = t.new_empty(segments, blocks, dtype=torch.int32)
    high, low, small_high, small_low = planes
    return Planes(high, low, small_high, small_low, scales, small, source, by_columns)


class _SplitPlan:
    """Launches of ``planes_split.cu``. Tensors of each matrix: those read, sums of 64 rows each,
    sums of all, and what is made by rows and by columns."""

    def __init__(self, sources: Sequence[Source], turns: Turns, device: int) -> None:
        derived = [s for s in sources if s.derivation is not Derivation.NONE]
        (activation,) = {s.activation for s in derived} or {"none"}
        of_groups = any(s.groups > 1 for s in sources if s.ragged is None)
        text = split_source(activation, of_groups, any(s.ragged is not None for s in sources))
        self._runs: list[Prepared] = []

        def run(kernel: str, block: Block, blocks: int) -> None:
            self._runs.append(prepared(text, kernel, block, SPLIT_THREADS, blocks, device))

        run(SPLIT_KERNEL, *_parameters(sources, turns))  # each launch has memory of its own
        for i, one in enumerate(sources):
            if one.sums is None:
                continue
            block, (_, columns) = Block(16 + RAGGED_BYTES + 16), one.sizes
            for j in range(2):
                block.address(8 * j, _GIVEN * i + READ + j)
            _put_ragged(block, 16, sources, one.ragged)
            across = -(-columns // _BIAS_COLUMNS)
            each = _blocks(one)[0] // one.groups
            block.numbers(16 + RAGGED_BYTES, "3i", each, columns, across)
            run(BIAS_KERNEL, block, one.groups * across)

    def run(self, *given: Tensor | None) -> None:
        """All launches."""
        for launch in self._runs:
            launch(*given)


def _blocks(source: Source) -> tuple[int, int]:
    """Of a matrix, blocks of 64 below each other and beside each other."""
    rows, columns = (up(size, BK) // BK for size in source.sizes)
    if source.ragged is not None:
        return source.ragged.most_blocks, columns
    return source.groups * rows, columns


def _parameters(sources: Sequence[Source], turns: Turns) -> tuple[Block, int]:
    """What ``planes_split.cu`` is told of all matrices, and how many blocks these have."""
    block, first = Block(_SPLIT_BYTES), 0
    for i, one in enumerate(sources):
        rows, columns = one.sizes
        made = one.rows_made
        wide = all(_is_wide(t) for t in one.read if t is not None)
        down, across = _blocks(one)
        at, tensor = _MATRIX_BYTES * i, _GIVEN * i
        for j in range(READ + 1):
            block.address(at + 8 * j, tensor + j, 15)
        at += 8 * (READ + 1)
        for way, (wanted, lines) in enumerate(((one.by_rows, made), (one.by_columns, columns))):
            side, of_side = at + _SIDE_BYTES * way, tensor + READ + 2 + MADE * way
            for j in range(MADE if wanted else 0):
                block.address(side + 8 * j, of_side + j, 15)
            block.numbers(side + 8 * MADE, "q", up(lines, BK))
        strides = [0 if t is None else t.stride(-2) for t in one.read]
        apart = [0 if t is None or t.dim() == 2 else t.stride(0) for t in one.read]
        table = rows, columns, pitch(columns), int(wide), first, across
        how = one.derivation, turns[i][1], down // one.groups, made
        told = *strides, *apart, *table, *how, int(one.ragged is not None)
        block.numbers(at + 2 * _SIDE_BYTES, f"{2 * READ}q11i", *told)
        if turns[i][0] == turns[i][1] - 1:
            first += down * across * turns[i][1]
    _put_ragged(block, _OF_GROUPS, sources, next((s.ragged for s in sources if s.ragged), None))
    block.numbers(_OF_GROUPS + RAGGED_BYTES, "i", len(sources))
    return block, first


def _put_ragged(block: Block, at: int, sources: Sequence[Source], of: Ragged | None) -> None:
    """The table, which is the last of the tensors."""
    if of is not None:
        block.address(at, _GIVEN * len(sources), 15)
        block.numbers(at + 8, "3i", *of.facts)


def _is_wide(t: Tensor) -> bool:
    """Whether its rows begin on 16 bytes."""
    apart = [s for s, size in zip(t.stride()[:-1], t.shape[:-1], strict=True) if size > 1]
    return t.data_ptr() % 16 == 0 and all(s % 4 == 0 for s in apart)


def _turns(sources: Sequence[Source]) -> Turns:
    """Of each matrix its place among those that take blocks by turns, and how many these are: what
    one of them has read is still near when the next one reads it."""
    found: list[tuple[int, int]] = []
    for _, one in groupby(sources, _read_by_turns):
        count = len(list(one))
        found += [(i, count) for i in range(count)]
    return tuple(found)


def _read_by_turns(source: Source) -> tuple[object, ...]:
    t = source.numbers
    return (t.shape, id(source)) if source.saved is None else (t.shape, source.saved.data_ptr())
