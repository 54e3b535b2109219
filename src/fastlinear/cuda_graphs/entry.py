"""One recorded call: its buffers, its graphs, and who still needs them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.graphs import Recording
from fastlinear.cuda_graphs.arguments import Outputs
from fastlinear.cuda_graphs.outputs import Generation
from fastlinear.cuda_graphs.results import Loans, Results

_GONE_BEFORE_LENDING = 3
_version = attrgetter("_version")


class Lease:
    """Held by a forward whose backward may still come; the graph's memory is its own till then."""

    __slots__ = ("__weakref__", "_saved", "_versions", "done")

    def __init__(self, saved: Sequence[Tensor]) -> None:
        self.done = False
        self._saved, self._versions = saved, list(map(_version, saved))

    def unchanged(self) -> bool:
        """Whether nothing that the backward reads was modified since the forward."""
        return list(map(_version, self._saved)) == self._versions


class Entry:
    """What one recording left behind.

    Attributes:
        key: its place in the table of graphs.
        device: where it runs.
        forward: the recorded forward.
        once: whether it is to have no spares.
        spares: more recordings of an inference, whose outputs callers get as they are.
        statics: the inputs' buffers; None for an input that is read where the caller has it.
        padded_in: which inputs hold rows of the batch in ``batch_dim``.
        outputs: the outputs' buffers.
        padded_out: which outputs hold rows of the batch.
        structure: what the outputs stand in.
        batch_dim, bucket: the padded dimension and its size; bucket None for exact sizes.
        differentiable: which outputs require a gradient; none of them in inference.
        backward: the recorded backward, if any output does.
        backward_spares: more recordings of the backward, whose results callers get as they are.
        dys: buffers for the gradients of the differentiable outputs.
        grads: the backward's result for each input and each trainable tensor, None where unused.
        reaches: for each differentiable output, whether it depends on each of these.
        saved: positions among the watched tensors of those whose values the backward reads.
        saved_out: positions among the outputs of those whose values the backward reads.
        lendable: the outputs of a forward that a backward follows, where they may be lent.
    """

    def __init__(
        self,
        key: Any,
        batch_dim: int,
        bucket: int | None,
        padded_in: list[bool],
        loans: Loans | None = None,
    ) -> None:
        self.key, self.batch_dim, self.bucket = key, batch_dim, bucket
        self.padded_in = padded_in
        self.device = torch.device("cpu")
        self.forward: Recording
        self.once = False
        self.spares: list[Results] = []
        self.statics: list[Tensor | None] = []
        self.outputs: list[Tensor] = []
        self.padded_out: list[bool] = []
        self.structure: Outputs
        self.differentiable: list[bool] = []
        self.backward: Recording | None = None
        self.backward_spares: list[Results] = []
        self.dys: list[Tensor] = []
        self.grads: list[Tensor | None] = []
        self.reaches: list[list[bool]] = []
        self.saved: list[int] = []
        self.saved_out: list[int] = []
        self.lendable: Results | None = None
        self.generation = Generation()
        self.lease: weakref.ref[Lease] | None = None
        self._loans, self._lent = loans or Loans(), False
        self._last: list[weakref.ref[Tensor]] = []
        self._gone = 0  # calls in a row whose outputs were gone by the next
        self._parts: dict[Any, list[Any]] = {}

    def busy(self) -> bool:
        """Whether a backward of the last forward may still come, or its lent outputs are held."""
        lease = None if self.lease is None else self.lease()
        if lease is not None and not lease.done:
            return True
        if self._lent:
            assert self.lendable is not None
            if not self.lendable.free():
                self._loans.allowed = False
                return True
            self._lent = False
        return False

    def hand_out(self, parts: Sequence[Tensor], lendable: bool) -> tuple[tuple[Tensor, ...], bool]:
        """These outputs of a forward that a backward follows, and whether they are only lent."""
        if lendable and self._loans.allowed:
            if self._gone <= _GONE_BEFORE_LENDING:
                self._gone = 0 if any(r() is not None for r in self._last) else self._gone + 1
            if self._gone > _GONE_BEFORE_LENDING:
                self._lent = True
                return tuple([p.detach() for p in parts]), True
        made = tuple([p.clone() for p in parts])
        self._last = [weakref.ref(o) for o in made]
        return made, False

    def rows(self, t: Tensor, padded: bool, rows: int | None) -> Tensor:
        """The first ``rows`` rows of a buffer, all of it where it is not padded."""
        if not padded or rows is None or rows == self.bucket:
            return t
        return t.narrow(self.batch_dim, 0, rows)

    def parts(
        self, what: str, sets: Sequence[Results], padded: Sequence[bool], rows: int | None
    ) -> list[tuple[Results, list[Any]]]:
        """Recordings' results, each with the first ``rows`` rows of what it writes.

        None of them where that part would not be laid out as the callable's own result.
        """
        if (what, rows) not in self._parts:
            made = [
                [
                    None if t is None else self.rows(t, p, rows)
                    for t, p in zip(s.tensors, padded, strict=True)
                ]
                for s in sets
            ]
            pairs = [
                (s, t, part)
                for s, parts in zip(sets, made, strict=True)
                for t, part in zip(s.tensors, parts, strict=True)
                if part is not None and part is not t
            ]
            whole = all(part.is_contiguous() for _, _, part in pairs)
            for s, _, part in pairs if whole else ():
                s.own(part)
            self._parts[what, rows] = list(zip(sets, made, strict=True)) if whole else []
        return self._parts[what, rows]
