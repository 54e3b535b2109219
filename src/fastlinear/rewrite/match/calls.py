"""The calls of a linear that one step of the model makes, by kind of input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastlinear.profile.observe import Call

Results = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Kind:
    """Calls of one linear on inputs of one shape, strides and dtype.

    Attributes:
        x: a sample of the input, (..., K), in the model's own strides.
        count: calls in one step.
        input_grad: whether dx is wanted.
    """

    x: Tensor
    count: int
    input_grad: bool


@dataclass(frozen=True, eq=False)
class SiteCalls:
    """All calls of one linear in one step, the most frequent kind first.

    Attributes:
        kinds: one entry for each shape, stride and dtype of its input.
        autocast: the autocast dtype in force, or None.
        grad: whether a call is to be differentiated.
    """

    kinds: tuple[Kind, ...]
    autocast: torch.dtype | None
    grad: bool

    @property
    def calls(self) -> int:
        """Calls in one step."""
        return sum(k.count for k in self.kinds)


def calls_of(calls: Iterable[Call]) -> SiteCalls:
    """Observed calls (with samples) by kind."""
    found: dict[int, list[Call]] = {}
    for call in calls:
        found.setdefault(id(call.sample), []).append(call)
    kinds = [
        Kind(same[0].sample, len(same), any(c.input_grad for c in same))
        for same in found.values()
        if same[0].sample is not None
    ]
    every = [c for same in found.values() for c in same]
    return SiteCalls(
        kinds=tuple(sorted(kinds, key=lambda k: -k.count)),
        autocast=next((c.autocast for c in every if c.autocast is not None), None),
        grad=any(c.grad for c in every),
    )
