"""From a call to its recording: keys, buckets, the bounded table of graphs, and refusals."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fastlinear.core import memory
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.graphs import Pool, Recorder, Table, bucket_of
from fastlinear.core.precision import float32_precision
from fastlinear.core.settings import batch_invariant
from fastlinear.cuda_graphs.arguments import positions, rebuild
from fastlinear.cuda_graphs.entry import Entry
from fastlinear.cuda_graphs.frozen import Frozen
from fastlinear.cuda_graphs.options import Counts, Options
from fastlinear.cuda_graphs.padding import CannotPad
from fastlinear.cuda_graphs.plan import Plan
from fastlinear.cuda_graphs.record import record
from fastlinear.cuda_graphs.results import Loans
from fastlinear.cuda_graphs.watch import Watch

_MAX_PLANS = 4096
_inside = threading.local()
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch.are_deterministic_algorithms_enabled


def recording() -> bool:
    """Whether this thread is recording a graphed callable right now."""
    return getattr(_inside, "recording", False)


class Graphs:
    """The graphs of one callable. Not safe without a lock around :meth:`plan` and the plan's run.

    Attributes:
        watch: what the callable reads besides its arguments.
        counts: how the calls went.
    """

    def __init__(
        self, target: Callable[..., Any], options: Options, watch: Watch, recorder: Recorder
    ) -> None:
        self.watch, self.counts = watch, Counts()
        self._target, self._options, self._recorder = target, options, recorder
        self._graphs: Table[Entry] = Table(options.max_graphs)  # by number
        self._twins: dict[Hashable, list[Entry]] = {}  # recordings of the same call
        self._numbers = count()
        self._plans: dict[Hashable, list[Plan | None]] = {}
        self._pool, self._loans, self._frozen = Pool(), Loans(), Frozen(watch)
        self._exact: set[Hashable] = set()  # callables whose rows cannot be compared
        self._warned: set[str] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Free every graph and its memory."""
        self._drop(self._graphs.make_room(self._options.max_graphs))
        self._plans.clear()

    def again(self, args: tuple[Any, ...]) -> Plan | None:
        """The plan of the last call, if one with these arguments and no others is like it."""
        return self._frozen.plan(args)

    def plan(
        self, spec: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan | None:
        """The plan for a call, None to run it plainly."""
        watch = self.watch
        grad = _grad_enabled()
        if not watch.unchanged(grad):
            watch.renew()
        mode = (
            grad and (bool(watch.trainable) or any(t.requires_grad for t in tensors)),
            watch.token,
            float32_precision(),
            batch_invariant(),
            _deterministic(),
            self._autocast() if _any_autocast() else None,
        )
        facts = [
            (t.shape, t.dtype, t.device, t.is_contiguous() or t.stride(), t.requires_grad)
            for t in tensors
        ]
        places: set[int] = set()
        if self._options.by_address:
            places = positions(args, kwargs, self._options.by_address)
        key = (spec, mode, *facts, *[tensors[i].data_ptr() for i in places])
        plans = self._plans.get(key)
        if plans is None:
            plans = self._plans[key] = []
        for plan in plans:
            if plan is None or not plan.entry.busy():
                if plan is not None:
                    self._graphs.get(plan.entry.key)
                    alone = len(args) == len(tensors) and not kwargs and not places
                    self._frozen.took(plan, tensors if alone else None)
                return plan
        try:
            found = self._resolve(key, spec, mode, facts, tensors, places)
        except UnsupportedError as error:
            self.refuse(error)
            found = None
        if len(self._plans) > _MAX_PLANS:
            self._plans.clear()
        self._plans.setdefault(key, []).append(found)
        return found

    def _resolve(
        self,
        key: Any,
        spec: Any,
        mode: Any,
        facts: list[Any],
        tensors: list[Tensor],
        places: set[int],
    ) -> Plan | None:
        """Find or record the graph of a call that has no plan yet."""
        self._check(tensors)
        dim, rows, bucket = self._options.batch_dim, None, None
        if dim is not None and all(t.dim() <= dim for t in tensors):
            raise InputError(
                "graphed",
                f"an argument that has dimension batch_dim={dim}, counted from 0",
                f"tensors of shapes {', '.join(str(tuple(t.shape)) for t in tensors)}",
                "Give the dimension that holds the rows, usually batch_dim=0, or leave "
                "batch_dim out for a graph of each exact size.",
            )
        if any(t.numel() == 0 for t in tensors):
            return None
        padded = [False] * len(tensors)
        if dim is not None:
            rows = next((t.shape[dim] for t in tensors if t.dim() > dim), None)
        if rows is not None and (spec, mode) not in self._exact:
            bucket = bucket_of(rows, self._options.buckets)
            if bucket is None:
                return None
            padded = [
                t.dim() > dim and t.shape[dim] == rows and i not in places  # type: ignore[operator, index]
                for i, t in enumerate(tensors)
            ]
        kept = tuple(
            (*s[:dim], *s[dim + 1 :], "rows") if p else s  # type: ignore[operator, index]
            for (s, *_), p in zip(facts, padded, strict=True)
        )
        base = (bucket, kept, spec, mode, *(f[1:] for f in facts), *key[2 + len(facts) :])
        try:
            entry = self._entry(base, bucket, padded, spec, tensors, places, mode[0])
        except CannotPad:
            self._exact.add((spec, mode))
            return self._resolve(key, spec, mode, facts, tensors, places)
        return Plan(entry, rows if bucket else None, self._options.reuse_outputs)

    def _entry(
        self,
        base: Any,
        bucket: int | None,
        padded: list[bool],
        spec: Any,
        tensors: list[Tensor],
        places: set[int],
        grad: bool,
    ) -> Entry:
        """A recording that no backward waits for: one of those at hand, or a new one."""
        for found in self._twins.get(base, ()):
            if not found.busy():
                self._graphs.get(found.key)
                return found
        memory.check()
        self._drop(self._graphs.make_room())
        number, dim = next(self._numbers), self._options.batch_dim or 0
        entry = Entry(number, dim, bucket, padded, self._loans)
        entry.once = self._options.reuse_outputs and not grad

        def run(given: Sequence[Tensor]) -> Any:
            held = iter(given)
            args = rebuild(spec[0], held)
            return self._target(*args, **(rebuild(spec[1], held) if spec[1] else {}))

        pool = Pool() if grad else self._pool
        _inside.recording = True
        try:
            record(
                entry,
                run,
                tensors,
                places,
                self.watch,
                self._recorder,
                pool,
                grad,
                self._options.warmup,
            )
        finally:
            _inside.recording = False
            self.watch.settle()
        memory.check()
        self.counts.recorded += 1
        self._graphs.put(entry.key, entry)
        self._twins.setdefault(base, []).append(entry)
        return entry

    def _drop(self, entries: list[Entry]) -> None:
        """Let go of graphs; one whose backward may still come lives until that has run."""
        if not entries:
            return
        self._frozen.drop()
        self._recorder.settle(entries[0].device)
        gone = set(map(id, entries))
        self.counts.freed += len(entries)
        self._twins = {
            k: kept
            for k, twins in self._twins.items()
            if (kept := [e for e in twins if id(e) not in gone])
        }
        self._plans = {
            k: still
            for k, plans in self._plans.items()
            if (still := [p for p in plans if p is None or id(p.entry) not in gone])
        }

    def _check(self, tensors: list[Tensor]) -> None:
        """Raise UnsupportedError where no graph can serve such tensors or the target."""
        kind = self._recorder.device_type
        why = self.watch.reason_not(kind)
        devices = {t.device for t in [*tensors, *self.watch.tensors] if t.dim()}
        if not tensors:
            why = "no tensor argument"
        for t in tensors:
            if t.layout is not torch.strided:
                why = f"a {t.layout} argument"
            if t.device.type != kind:
                why = f"a {tuple(t.shape)} argument on {t.device}"
        if why is None and len(devices) > 1:
            why = f"tensors on {', '.join(sorted(map(str, devices)))}"
        if why is not None:
            raise UnsupportedError(
                "graphed",
                f"dense tensors on one {kind} device and a target without hooks",
                why,
                "Move them there, or pass on_unsupported='eager'.",
            )

    def refuse(self, error: UnsupportedError) -> None:
        if not self._options.eager:
            raise error
        text = str(error)
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"graphed runs its target plainly: {text}", stacklevel=4)

    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self._recorder.device_type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
