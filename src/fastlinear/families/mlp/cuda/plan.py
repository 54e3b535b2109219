"""What the prepared launches of ``whole_cuda`` share: how they run, and how they are recorded.

A kernel takes one block of parameters. A recorded launch has a copy of it, with the sizes, the
descriptors of weights and the workspace of the call that it was recorded from; the fast path fills
in the other addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.fastpath.recorder import Recording
from fastlinear.kernels.cuda.prepared import record_block
from fastlinear.native import cuda_driver as driver


@dataclass(frozen=True)
class Places:
    """Where in its parameters a kernel finds addresses, in bytes.

    Attributes:
        x, y: of the tensors.
        weights: of the first layer's; the others follow. None where descriptors hold them.
        biases, saved: of the first layer's.
        shared: whether blocks share a workspace, which belongs to one stream.
    """

    x: int
    y: int
    weights: int | None
    biases: int
    saved: int
    shared: bool


class WholePlan(ABC):
    """One prepared launch: fixed shapes, any addresses. Not safe to share without a lock.

    Attributes:
        places: where its parameters have addresses.
        out_shape, saved_shapes: of y, and of what each layer keeps; () for nothing.
        last_saves_pre: whether the last layer keeps its pre-activation, else y.
    """

    launch: driver.Launch
    places: Places
    out_shape: tuple[int, int]
    saved_shapes: list[tuple[int, int]]
    last_saves_pre: bool
    _params: Any

    @abstractmethod
    def fill(
        self,
        x: Tensor,
        y: Tensor,
        saved: Sequence[Tensor],
        weights: Sequence[int],
        biases: Sequence[int],
        stream: int,
    ) -> None:
        """Write sizes and addresses into the parameters; 0 for no bias."""

    def aligned(self, x: Tensor) -> Tensor:
        """x as the kernel reads it."""
        return x

    def run(
        self, x: Tensor, weights: Sequence[int], biases: Sequence[int], stream: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Enqueue on a raw stream; y and what the backward reads, as ``whole_cuda.forward``."""
        x, (y, saved) = self.aligned(x), self._results(x)
        self.fill(x, y, saved, weights, biases, stream)
        self.launch.run(stream)
        return y, saved

    def record(
        self,
        recording: Recording,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        stream: int,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same as a step of a tape."""
        x, (y, saved), places = self.aligned(x), self._results(x), self.places
        shifts = [0 if b is None else b.data_ptr() for b in biases]
        self.fill(x, y, saved, [w.data_ptr() for w in weights], shifts, stream)
        tensors: list[tuple[int, Tensor | None]] = [(places.x, x), (places.y, y)]
        if places.weights is None:
            for weight in weights:
                recording.only_at(weight)
        else:
            tensors += [(places.weights + 8 * i, w) for i, w in enumerate(weights)]
        tensors += [(places.biases + 8 * i, b) for i, b in enumerate(biases)]
        tensors += [(places.saved + 8 * i, t) for i, t in enumerate(saved)]
        if places.shared:
            recording.only_on(stream)
        record_block(recording, self.launch, self._params, [(p, t, 0) for p, t in tensors])
        return y, saved

    def _results(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = x.new_empty(self.out_shape)
        if not self.saved_shapes:
            return y, ()
        last = torch.empty_like(y) if self.last_saves_pre else y
        return y, (*[x.new_empty(shape) for shape in self.saved_shapes[:-1]], last)
