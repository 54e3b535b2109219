"""What a graph writes, handed out where it lies while nobody holds an earlier hand-out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from operator import le

import torch
from torch import Tensor

from fastlinear.core.graphs import Recording

_address = Tensor.data_ptr
_holders = torch._C._storage_Use_Count


def _all_where_they_were(tensors: list[Tensor], addresses: list[int], indices: list[int]) -> bool:
    return list(map(_address, tensors)) == addresses


# a single pass, in builds of torch with CUDA
all_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _all_where_they_were)


class Results:
    """One recording and the tensors it writes, which callers may get as they are.

    A tensor that shares memory with one of them counts as a hand-out for as long as it lives,
    whatever it is: a view, a ``.grad``, what autograd keeps for a backward.

    Args:
        recording: what writes them.
        tensors: where it writes, None for what it does not compute.
        readers: other recordings that read what it writes.
    """

    def __init__(
        self,
        recording: Recording,
        tensors: Sequence[Tensor | None],
        readers: Sequence[Recording] = (),
    ) -> None:
        self.recording = recording
        self.tensors = [None if t is None else t.detach() for t in tensors]
        recording.outputs = None
        self._written = [t for t in self.tensors if t is not None]
        self._addresses = list(map(_address, self._written))
        self._every = list(range(len(self._written)))
        self._storages = [t.untyped_storage() for t in self._written]
        self._names = [s._cdata for s in self._storages]
        self._own = [
            self._names.count(n) + sum(r.holders(n) for r in (recording, *readers)) + _WRAPPED
            for n in self._names
        ]

    def places(self) -> list[int]:
        """The address of the memory behind each tensor."""
        return [s.data_ptr() for s in self._storages]

    def own(self, part: Tensor) -> Tensor:
        """A part of one of the tensors that is held here as well, and no hand-out."""
        name = part.untyped_storage()._cdata
        self._own = [n + (name == s) for n, s in zip(self._own, self._names, strict=True)]
        return part

    def free(self) -> bool:
        """Whether no caller holds what was handed out, nor moved it elsewhere."""
        return all(map(le, map(_holders, self._names), self._own)) and all_at(
            self._written, self._addresses, self._every
        )


def _wrapped() -> int:
    """How many holders of its memory a storage object itself counts for."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return int(_holders(storage._cdata)) - 1


_WRAPPED = _wrapped()


class Loans:
    """Whether forwards that a backward follows hand their outputs out as they lie.

    There is one graph for such a forward. So its outputs are lent only after a few calls whose
    outputs were gone by the next one, and never again after a loan that was kept: the call that
    met it needed another recording.

    Attributes:
        allowed: whether no loan was kept so far.
    """

    def __init__(self) -> None:
        self.allowed = True


def apart(sets: Sequence[Results], within: bool) -> bool:
    """Whether recordings of the same run write to memory of their own.

    What coincides is no result of the run: an argument passed through, a parameter, a saved value.

    Args:
        sets: the recordings.
        within: whether the tensors of each must be apart from one another too.
    """
    places = [s.places() for s in sets]
    if any(0 in p or (within and len(set(p)) < len(p)) for p in places):
        return False
    return all(not set(a) & set(b) for a, b in combinations(places, 2))
