"""How a call goes through a recording: arguments in, replay, results out, and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.errors import UnsupportedError
from fastlinear.cuda_graphs.entry import Entry, Lease
from fastlinear.cuda_graphs.outputs import ReusedOutput
from fastlinear.cuda_graphs.watch import Watch


class Plan:
    """An entry as calls of one exact shape use it.

    Args:
        entry: the recording.
        rows: how many rows of the bucket they fill.
        reuse_outputs: whether outputs may stay in the graph's memory.
    """

    def __init__(self, entry: Entry, rows: int | None, reuse_outputs: bool) -> None:
        self.entry, self._rows = entry, rows
        self._reuse = reuse_outputs and entry.backward is None
        self._watched: list[Tensor] | None = None
        self._saved: list[Tensor] = []
        self._fill: list[tuple[int, Tensor, int]] = []  # argument, its buffer, the address
        self._pad: list[tuple[Tensor, Tensor]] = []
        dim = entry.batch_dim
        for i, static in enumerate(entry.statics):
            if static is None:
                continue
            part = entry.rows(static, entry.padded_in[i], rows)
            self._fill.append((i, part, part.data_ptr()))
            if part is not static and entry.backward is not None:
                rest = static.narrow(dim, part.shape[dim], static.shape[dim] - part.shape[dim])
                self._pad.append((rest, part.narrow(dim, 0, 1)))
        self._write: Callable[..., object] = partial(_write, self._fill, self._pad)
        if len(self._fill) == 1 and not self._pad:
            self._write = partial(_write_one, *self._fill[0])
        self._outputs = [
            entry.rows(o, p, rows) for o, p in zip(entry.outputs, entry.padded_out, strict=True)
        ]
        padded = [p for p, d in zip(entry.padded_out, entry.differentiable, strict=True) if d]
        self._dys = [(entry.rows(dy, p, rows), dy) for dy, p in zip(entry.dys, padded, strict=True)]
        self._write_dys: Callable[..., object] = partial(_write_dys, self._dys)
        if len(entry.outputs) == 1 and self._dys and self._dys[0][0] is self._dys[0][1]:
            self._write_dys = self._dys[0][0].copy_
        if entry.backward is None:
            self._spares = entry.parts("outputs", entry.spares, entry.padded_out, rows)
        else:
            padded = [*entry.padded_in, *[False] * (len(entry.grads) - len(entry.padded_in))]
            self._spares = entry.parts("grads", entry.backward_spares, padded, rows)
            lendable = [] if entry.lendable is None else [entry.lendable]
            lent = entry.parts("lent", lendable, entry.padded_out, rows)
            self._lendable = bool(lent)
            if lent:
                self._outputs = lent[0][1]
            self._saved_out = [entry.outputs[i] for i in entry.saved_out]
            self._grads = [
                None if g is None else entry.rows(g, p, rows)
                for g, p in zip(entry.grads, padded, strict=True)
            ]
            self._used = [g for g in self._grads if g is not None]

    def buffers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Where the graph reads each argument of such a call."""
        entry = self.entry
        return [
            t if s is None else entry.rows(s, p, self._rows)
            for t, s, p in zip(tensors, entry.statics, entry.padded_in, strict=True)
        ]

    def infer(self, tensors: Sequence[Tensor]) -> Any:
        """One call without gradients: copy in, replay; copy out if earlier results are held."""
        entry = self.entry
        if self._reuse:
            entry.generation.count += 1
            entry.forward.replay(self._write, tensors)
            return entry.structure.rebuild(
                [ReusedOutput.guard(o, entry.generation) for o in self._outputs]
            )
        for spare, parts in self._spares:
            if spare.free():
                spare.recording.replay(self._write, tensors)
                return entry.structure.rebuild([p.detach() for p in parts])  # type: ignore[union-attr]
        entry.forward.replay(self._write, tensors)
        return entry.structure.rebuild([o.clone() for o in self._outputs])

    def train(self, tensors: Sequence[Tensor], watch: Watch) -> Any:
        """One call whose backward will be a replay as well."""
        if watch.tensors is not self._watched:
            self._watched = watch.tensors
            self._saved = [watch.tensors[i] for i in self.entry.saved]
        made = _apply(self, len(tensors), self._saved, *tensors, *watch.trainable)
        return self.entry.structure.rebuild(made)

    def run_forward(
        self, tensors: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Lease]:
        """Copy in, replay, copy or lend out; the lease keeps the graph's memory for the backward.

        The backward also needs ``saved`` to be as they are now.
        """
        self.entry.forward.replay(self._write, tensors)
        outputs, lent = self.entry.hand_out(self._outputs, self._lendable)
        lease = Lease([*saved, *self._saved_out] if lent else saved)
        self.entry.lease = weakref.ref(lease)
        return outputs, lease

    def run_backward(self, dys: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of all inputs and trainable tensors, in memory that nobody else holds."""
        for spare, parts in self._spares:
            if spare.free():
                spare.recording.replay(self._write_dys, *dys)
                return [None if g is None else g.detach() for g in parts]
        backward = self.entry.backward
        assert backward is not None
        backward.replay(self._write_dys, *dys)
        fresh = [torch.empty_like(g) for g in self._used]
        torch._foreach_copy_(fresh, self._used)
        new = iter(fresh)
        return [None if g is None else next(new) for g in self._grads]


def _write_dys(buffers: Sequence[tuple[Tensor, Tensor]], *dys: Tensor | None) -> None:
    for (part, whole), dy in zip(buffers, dys, strict=True):
        if dy is None or part is not whole:
            whole.zero_()
        if dy is not None:
            part.copy_(dy)


def _write_one(i: int, buffer: Tensor, address: int, tensors: Sequence[Tensor]) -> None:
    if tensors[i].data_ptr() != address:
        buffer.copy_(tensors[i])


def _write(
    fill: Sequence[tuple[int, Tensor, int]],
    pad: Sequence[tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor],
) -> None:
    """Fill the inputs' buffers; an argument that already lies in its buffer is not copied."""
    moved = [(buffer, tensors[i]) for i, buffer, a in fill if tensors[i].data_ptr() != a]
    if len(moved) > 1 and not any(t.is_neg() or t.is_conj() for _, t in moved):
        torch._foreach_copy_([b for b, _ in moved], [t for _, t in moved])
    else:
        for buffer, t in moved:
            buffer.copy_(t)
    for rest, row in pad:  # real rows, so that no gradient is 0 times infinity
        rest.copy_(row.expand_as(rest))


class _Step(torch.autograd.Function):
    """Joins a forward graph and a backward graph into one differentiable step."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, arguments: int, saved: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, ctx.lease = plan.run_forward(tensors[:arguments], saved)
        ctx.plan = plan
        flags = plan.entry.differentiable
        if len(outputs) > 1:
            ctx.mark_non_differentiable(*(o for o, d in zip(outputs, flags, strict=True) if not d))
            ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "graphed",
                "first-order gradients",
                "a backward with create_graph=True",
                "Call the callable itself, not its graphed form, for double backward.",
            )
        if ctx.lease.done:
            raise UnsupportedError(
                "graphed",
                "one backward for each forward",
                "a second backward through the same forward (retain_graph=True)",
                "Sum the losses and go backward once, or call the callable itself.",
            )
        if not ctx.lease.unchanged():
            raise UnsupportedError(
                "graphed",
                "parameters and outputs that the backward reads to be as the forward left them",
                "one that was modified in place between forward and backward",
                "Go backward before the optimizer's step.",
            )
        plan: Plan = ctx.plan
        flags = plan.entry.differentiable
        if len(dys) > 1:
            dys = tuple([dy for dy, d in zip(dys, flags, strict=True) if d])
        grads = plan.run_backward(dys)
        ctx.lease.done = True
        if any(dy is None for dy in dys):  # what only other outputs depend on has no gradient
            reaches = [r for dy, r in zip(dys, plan.entry.reaches, strict=True) if dy is not None]
            grads = [g if any(of) else None for g, *of in zip(grads, *reaches, strict=True)]
        return (None, None, None, *grads)


_apply = super(torch.autograd.Function, _Step).apply
"""``_Step.apply`` without its look for functorch's tensors, which never come here."""
