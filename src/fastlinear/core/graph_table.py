"""Batch buckets, and a bounded table of recordings."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from fastlinear.core.errors import InputError

T = TypeVar("T")
POWERS_OF_TWO: tuple[int, ...] = tuple(1 << i for i in range(13))
"""The default batch buckets: 1, 2, 4 … 4096 rows."""


def checked_buckets(function: str, buckets: Sequence[int]) -> tuple[int, ...]:
    """The buckets in rising order. Raises InputError unless they are whole numbers above 0."""
    if not buckets or any(type(b) is not int or b < 1 for b in buckets):
        raise InputError(
            function,
            "batch_buckets to be whole numbers above 0",
            f"batch_buckets={buckets!r}",
            "Leave it out for 1, 2, 4 … 4096.",
        )
    return tuple(sorted(set(buckets)))


def bucket_of(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds ``rows``, None where none does."""
    i = bisect_left(buckets, rows)
    return buckets[i] if i < len(buckets) else None


class Table(Generic[T]):
    """At most ``size`` values by key; the one not used for longest leaves first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        """The value, now the most recently used one."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: Hashable, value: T) -> None:
        """Add a value; ``make_room`` first where what leaves must leave before it is made."""
        self._values[key] = value
        self._values.move_to_end(key)
        self.make_room(0)

    def make_room(self, places: int = 1) -> list[T]:
        """Drop the least recently used until ``places`` more fit; returns those dropped."""
        dropped = []
        while self._values and len(self._values) > self.size - places:
            dropped.append(self._values.popitem(last=False)[1])
        return dropped

    def clear(self) -> None:
        """Drop everything."""
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
