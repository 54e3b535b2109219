"""Copies of weights in a library's own layout, kept while the weight is what it was.

At every call all bytes of the weight are read and their digest is compared (``weight_hash.py``), so
that writes through ``.data``, NumPy or other memory that the version counter does not show are seen
too. A changed version counter or address says the same sooner; an unchanged one says nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from fastlinear.ops.common import weight_hash
from fastlinear.ops.common.weight_hash import Digest

_FLEETING = 16  # owners of one address in quick succession, a call each, before no copy is made
_FORGET_S = 10.0
_MAX_OWNERS = 4096

V = TypeVar("V")


def reason_not() -> str | None:
    """Why a copy of a weight could not be checked, as far as is known without compiling."""
    return weight_hash.reason_not()


@dataclass(slots=True)
class Entry(Generic[V]):
    """What is kept of one weight, and how the weight looked before it was made."""

    value: V
    version: int
    pointer: int
    digest: Digest
    owner: Owner | None = None


@dataclass(slots=True)
class Owner:
    """The tensor that was last at an address.

    Attributes:
        base: itself.
        count: how many others were there before, in quick succession and for one call each.
        last: when it was asked for last, in seconds.
        served: whether a second call found what was kept of it.
    """

    base: weakref.ref[Tensor]
    count: int
    last: float
    served: bool = False


class Packs(Generic[V]):
    """Weight → what was made of it, no longer than the weight lives or stays as it is.

    Attributes:
        held: (id of the base tensor, shape, strides, offset, dtype) → (weak reference, its entry).
            A view (Conv1D's transpose) is made anew at every call, so the base is what lives.
        owners: (address, shape, strides) → whose it was last.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Entry[V]]] = {}
        self.owners: dict[tuple[Any, ...], Owner] = {}

    def get(self, weight: Tensor) -> V | None:
        """What was put for this (N, K) weight on the CPU, or None where its bytes are others now.

        Reads the whole weight if something was put.
        """
        entry = self._held(weight)
        if entry is None or weight_hash.digest(weight) != entry.digest:
            return None
        if entry.owner is not None:
            entry.owner.served = True
        return entry.value

    def glance(self, weight: Tensor) -> V | None:
        """As ``get`` without reading the weight: only for what need not be that of its values."""
        entry = self._held(weight)
        return None if entry is None else entry.value

    def make(self, weight: Tensor, maker: Callable[[], V]) -> V:
        """What is made of the weight, kept as that of its values before the making began.

        Nothing is kept of inference tensors, which have no version counter, nor where digests
        cannot be had.
        """
        if not self.keeps(weight):
            return maker()
        base = weight._base if weight._base is not None else weight
        version, pointer, digest = weight._version, weight.data_ptr(), weight_hash.digest(weight)
        entry = Entry(maker(), version, pointer, digest, self.owners.get(_memory(weight)))
        held, key = self.held, _key(base, weight)
        held[key] = (weakref.ref(base, lambda _: held.pop(key, None)), entry)
        return entry.value

    @staticmethod
    def keeps(weight: Tensor) -> bool:
        """Whether ``make`` would keep anything of the weight; compiles the hash at first."""
        return not weight.is_inference() and weight_hash.why_not_loaded() is None

    def _held(self, weight: Tensor) -> Entry[V] | None:
        """The weight's entry unless version counter or address show a change."""
        base = weight._base if weight._base is not None else weight
        reference, entry = self.held.get(_key(base, weight), (None, None))
        if reference is None or entry is None or reference() is not base:
            return None
        same = entry.version == weight._version and entry.pointer == weight.data_ptr()
        return entry if same else None

    def fleeting(self, weight: Tensor) -> bool:
        """Whether weights at this address keep coming as new tensors, so that a copy serves one
        call: a compiled graph makes the views it hands on anew each time."""
        base = weight._base if weight._base is not None else weight
        key, now = _memory(weight), time.monotonic()
        before, count = self.owners.get(key), 0
        if before is not None and before.base() is not base and now - before.last < _FORGET_S:
            count = 0 if before.served else before.count + 1
        if len(self.owners) >= _MAX_OWNERS:
            self.owners.clear()
        self.owners[key] = Owner(weakref.ref(base), count, now)
        return count > _FLEETING

    def clear(self) -> None:
        """Drop everything."""
        self.held.clear()
        self.owners.clear()


def _key(base: Tensor, weight: Tensor) -> tuple[Any, ...]:
    place = weight.storage_offset()
    return id(base), weight.shape, weight.stride(), place, weight.dtype


def _memory(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.shape, weight.stride()
