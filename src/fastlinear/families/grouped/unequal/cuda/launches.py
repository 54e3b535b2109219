"""Launches of products of groups of unequal sizes: memory of their arguments, prepared once for
calls of the same sizes.

The groups' pointers and sizes travel among the launch's arguments: nothing is copied to the device
for a call, nothing waits, and weights may move.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from fastlinear.families.grouped.unequal.cuda.compiled import MAX_GROUPS, kernel
from fastlinear.families.grouped.unequal.cuda.config import (
    ADD,
    EXTRAS,
    GRAD_INPUT,
    GRAD_WEIGHT,
    Choice,
    Extras,
    Sizes,
    largest_first,
    odd_rows,
)
from fastlinear.fastpath import recorder
from fastlinear.kernels.cuda.prepared import record_block
from fastlinear.native import cuda_driver as driver

Call = tuple[int, str, bool]
"""Which product, the activation, whether the pre-activation is kept."""
Pointers = tuple[Sequence[tuple[Tensor, int] | None] | None, ...]
"""Lists of operands, one a group: a tensor and how many bytes behind its first; None for what is
not there."""
Pitches = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Numbers from a row of a, and of b, of every group to the next; None where all are dense."""
_POINTERS, _SHARED = 6, 3  # of a group, and of one whose shares are added up behind tiles
_PLACES = (32, MAX_GROUPS)  # of the groups of a launch: arguments take time to hand over
_MAX_PLANS = 1024


def share_numbers(rows: int, cols: int) -> int:
    """Numbers of a share of a result (rows, cols) and db, as groups.h has them."""
    return -(-rows * cols // 4) * 4 + -(-rows // 4) * 4


@dataclass(frozen=True)
class Kind:
    """What launches are prepared for.

    Attributes:
        call: which product.
        dtype: of all tensors.
        sizes, pitches: of each group's product.
        choice: how it is computed.
        shares: (rows, cols, parts) of each result whose shares are added up: dW's behind the tiles
            of dx, others in a launch of their own.
        given: which of the pointers there are: the others stay 0.
        early: the launch of dx begins under the end of that of dW; one that only adds under the
            end of the one before.
    """

    call: Call
    dtype: torch.dtype
    sizes: Sizes
    pitches: Pitches
    choice: Choice
    shares: Sizes
    given: tuple[bool, ...]
    early: bool = False

    def extras(self) -> Extras:
        """What the launches have beside their products."""
        mode, half = self.call[0], self.dtype.itemsize == 2
        divided = any(self.choice.parts(k) > 1 for _, _, k in self.sizes)
        found = (
            divided,
            bool(self.shares),
            mode == GRAD_WEIGHT and self.given[3],
            half and odd_rows(self.sizes, mode, self.pitches),
            self.early or (divided and mode != GRAD_WEIGHT),
        )
        return tuple([name for name, there in zip(EXTRAS, found, strict=True) if there])


@dataclass(frozen=True)
class Product:
    """A product of all groups: of what kind, and on what memory.

    Attributes:
        pointers: a, saved, b, bias, c and more of every group.
        shared: shares, the result and db of every group of the kind's ``shares``; in a launch
            that only adds the pre-activation for db, and biases.
    """

    kind: Kind
    pointers: Pointers
    shared: Pointers


class Part:
    """The launch of some of a call's groups, of known sizes, again and again: memory of a
    ``Groups`` of groups.h, into which each call writes its addresses.

    Args:
        kernel: what is launched.
        kind: of the call.
        which: its groups, in order.
        shared: those whose shares are added up, by their number among the kind's.
        places: how many groups the kernel's arguments have room for.
    """

    def __init__(
        self, kernel: Any, kind: Kind, which: Sequence[int], shared: Sequence[int], places: int
    ) -> None:
        mode, tiles = kind.call[0], kind.choice.tiles
        extras = kind.extras()
        parts = [kind.choice.parts(depth) for _, _, depth in kind.sizes]
        each = [tiles.count((size,)) * n for size, n in zip(kind.sizes, parts, strict=True)]
        threads = 4 * tiles.threads  # numbers that a block adds up
        added = [-(-share_numbers(m, n) // threads) for m, n, _ in kind.shares]
        columns = [
            *([size[i] for size in kind.sizes] for i in range(3)),
            _firsts(which, each),
            *([parts] if "PARTS" in extras else []),
            *(kind.pitches or ()),
        ]
        more = [*([size[i] for size in kind.shares] for i in range(3)), _firsts(shared, added)]
        tables = [] if mode == ADD else [(_POINTERS, columns, which)]
        if "ADDS" in extras:
            tables.append((_SHARED + (mode == ADD), more, shared))
        self._lists: list[tuple[int, Struct, Sequence[int]]] = []  # where addresses go, and whose
        numbers, size = [], 0
        for pointers, table, groups in tables:
            addresses = Struct(f"{len(groups)}Q")
            self._lists += [(size + 8 * places * i, addresses, groups) for i in range(pointers)]
            size += 8 * places * pointers
            numbers += [
                (size + 4 * places * i, [column[g] for g in groups])
                for i, column in enumerate(table)
            ]
            size += 4 * places * len(table)
        total = sum(each[g] for g in which)
        numbers.append((size, [len(shared), total]))
        self._memory = (ctypes.c_uint64 * (size // 8 + 1))()
        for offset, column in numbers:
            Struct(f"{len(column)}i").pack_into(self._memory, offset, *column)
        arguments = [self._memory, ctypes.c_int(len(which))]
        self._launch = driver.Launch(kernel, tiles.threads, 1, arguments)  # type: ignore[arg-type]
        self._launch.set_grid(total + sum(added[g] for g in shared))
        self._lock = threading.Lock()

    def begin_early(self) -> None:
        """Let the launch begin before the end of the one before it, for which its kernel waits."""
        self._launch.begin_early()

    def run(self, product: Product, stream: int) -> None:
        """Launch on tensors of every group of the call."""
        with self._lock:  # the driver copies the arguments before it returns
            for offset, addresses, groups, places in self._places(product):
                addresses.pack_into(self._memory, offset, *[_address(places[g]) for g in groups])
            self._launch.run(stream)

    def record(self, recording: recorder.Recording, product: Product) -> None:
        """Launch as a step of a tape."""
        places = [
            (offset + 8 * i, *place)
            for offset, _, groups, operands in self._places(product)
            for i, place in enumerate(operands[g] for g in groups)
            if place is not None
        ]
        record_block(recording, self._launch, self._memory, places, mask=0)  # any alignment serves

    def _places(self, product: Product) -> Iterator[tuple[int, Struct, Sequence[int], Any]]:
        """Where lists of addresses go, how, of which groups, and what all groups have."""
        lists = (*product.pointers, *product.shared)
        for (offset, addresses, groups), operands in zip(self._lists, lists, strict=False):
            if operands is not None:
                yield offset, addresses, groups, operands


def _firsts(which: Sequence[int], counts: Sequence[int]) -> list[int]:
    """How many there are before those of each group; only of groups in ``which``."""
    found, total = [0] * len(counts), 0
    for g in which:
        found[g] = total
        total += counts[g]
    return found


def parts_of(kind: Kind, device: int) -> tuple[Part, ...]:
    """New launches of such products: one for every ``MAX_GROUPS`` groups."""
    parts = [kind.choice.parts(depth) for _, _, depth in kind.sizes]
    lists = largest_first(kind.sizes, kind.call[0], parts), range(len(kind.shares))
    chunks = ([each[i : i + MAX_GROUPS] for i in range(0, len(each), MAX_GROUPS)] for each in lists)
    found = []
    for which, shared in zip_longest(*chunks, fillvalue=()):
        places = next(n for n in _PLACES if max(len(which), len(shared)) <= n)
        found.append(Part(_loaded(kind, places, device), kind, which, shared, places))
        if kind.early and kind.call[0] in (GRAD_INPUT, ADD) and len(found) == 1:
            found[0].begin_early()
    return tuple(found)


def _loaded(kind: Kind, places: int, device: int) -> driver.Kernel:
    pitched = kind.pitches is not None
    with torch.cuda.device(device), driver.loading_allowed():
        return kernel(
            kind.dtype, *kind.call, kind.choice.tiles, places, pitched, kind.extras(), device
        )


@lru_cache(maxsize=_MAX_PLANS)
def kept_parts(kind: Kind, device: int) -> tuple[Part, ...]:
    """The launches of such products, whose memory a launch at a time writes to."""
    return parts_of(kind, device)


def run(product: Product, device: torch.device) -> None:
    """Launch on tensors, or record the launches."""
    index, recording = device.index, recorder.active()
    if recording is not None:
        for part in parts_of(product.kind, index):
            part.record(recording, product)
        return
    driver.make_current(index)
    stream = torch._C._cuda_getCurrentRawStream(index)
    for part in kept_parts(product.kind, index):
        part.run(product, stream)


def _address(place: tuple[Tensor, int] | None) -> int:
    return 0 if place is None else place[0].data_ptr() + place[1]
