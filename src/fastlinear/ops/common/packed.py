"""Copies of weights in a library's own layout, kept while the weight is what it was.

A copy is dropped when the weight's version counter, storage or a probe of its values changes. The
probe (a dozen elements, read where they lie) catches writes through ``.data`` that bypass the
version counter; such a write to single elements that the probe does not cover is not seen.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

# each may miss every cache; prime, so that the probe's stride rarely lines up with a row
_PROBE_ELEMENTS = 13
_PROBE_SIDE = 4
_FLEETING = 16  # owners of one address in quick succession, a call each, before no copy is made
_FORGET_S = 10.0
_MAX_OWNERS = 4096

V = TypeVar("V")


@dataclass(slots=True)
class Entry(Generic[V]):
    """What is kept of one weight, and how the weight looked then."""

    value: V
    version: int
    pointer: int
    probe: np.ndarray[Any, Any]  # the weight's own memory: read only while ``pointer`` holds
    seen: bytes  # what the probe read when the weight was packed
    owner: Owner | None = None

    def valid_for(self, weight: Tensor) -> bool:
        """Whether the weight is what was packed, as far as version, storage and probe tell."""
        return (
            self.version == weight._version
            and self.pointer == weight.data_ptr()
            and self.probe.tobytes() == self.seen
        )


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
        held: (id of the base tensor, shape, strides, offset) → (weak reference, its entry). A view
            (Conv1D's transpose) is made anew at every call, so the base is what lives.
        owners: (address, shape, strides) → whose it was last.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Entry[V]]] = {}
        self.owners: dict[tuple[Any, ...], Owner] = {}

    def get(self, weight: Tensor) -> V | None:
        """What was put for this (N, K) weight on the CPU, or None where that is not valid now."""
        base = weight._base if weight._base is not None else weight
        key = (id(base), weight.shape, weight.stride(), weight.storage_offset())
        held = self.held.get(key)
        if held is not None and held[0]() is base and held[1].valid_for(weight):
            owner = held[1].owner
            if owner is not None:
                owner.served = True
            return held[1].value
        return None

    def put(self, weight: Tensor, value: V) -> None:
        """Keep what was made of the weight as it is now.

        Inference tensors have no version counter: nothing says when they change, so nothing is
        kept of them.
        """
        if weight.is_inference():
            return
        base = weight._base if weight._base is not None else weight
        key = (id(base), weight.shape, weight.stride(), weight.storage_offset())
        seen = probe(weight)
        entry = Entry(value, weight._version, weight.data_ptr(), seen, seen.tobytes())
        entry.owner = self.owners.get(_memory(weight))
        held = self.held
        held[key] = (weakref.ref(base, lambda _: held.pop(key, None)), entry)

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


def _memory(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.shape, weight.stride()


def probe(weight: Tensor) -> np.ndarray[Any, Any]:
    """A dozen elements of the weight where they lie; keeps its storage alive no more than a number.

    Torch's own views would, and cost ten times as much to read.
    """
    n, k = weight.shape
    across, along = weight.stride()
    size: tuple[int, ...]
    strides: tuple[int, ...]
    if (along == 1 and across == k) or (across == 1 and along == n):  # dense: one stride does
        step = max(1, n * k // _PROBE_ELEMENTS)
        size, strides = (-(-n * k // step),), (step,)
    else:
        row, column = max(1, n // _PROBE_SIDE), max(1, k // _PROBE_SIDE)
        size = (-(-n // row), -(-k // column))
        strides = (across * row, along * column)
    width = weight.element_size()
    extent = 1 + sum((count - 1) * stride for count, stride in zip(size, strides, strict=True))
    memory = (ctypes.c_char * (extent * width)).from_address(weight.data_ptr())
    numbers = np.frombuffer(memoryview(memory), f"u{width}")  # type: ignore[arg-type]
    return np.lib.stride_tricks.as_strided(numbers, size, [stride * width for stride in strides])
