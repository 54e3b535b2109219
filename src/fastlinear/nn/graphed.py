"""``fl.graphed``: a callable whose kernels are recorded once and replayed as one CUDA graph."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.graphs import (
    POWERS_OF_TWO,
    CudaRecorder,
    Pool,
    Recorder,
    Table,
    bucket_of,
    checked_buckets,
)
from fastlinear.core.precision import float32_precision
from fastlinear.nn.graph_arguments import flatten, positions, rebuild
from fastlinear.nn.graph_entry import Entry, Plan
from fastlinear.nn.graph_record import CannotPad, record
from fastlinear.nn.graph_watch import Watch

_MAX_PLANS = 4096
_inside = threading.local()
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_is_compiling = torch.compiler.is_compiling
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_deterministic = torch.are_deterministic_algorithms_enabled


def graphed(
    target: Callable[..., Any],
    *,
    batch_dim: int | None = None,
    batch_buckets: Sequence[int] | None = None,
    max_graphs: int = 16,
    reuse_outputs: bool = False,
    by_address: Sequence[int | str] = (),
    watch: Sequence[Any] = (),
    on_unsupported: str = "error",
    warmup: int = 2,
) -> Graphed:
    """A callable that replays ``target`` as one CUDA graph, forward and backward.

    Args:
        target: a module, a method or a function of tensors on one CUDA device.
        batch_dim: the dimension that holds rows which ``target`` treats each alone. Calls are then
            padded to the next bucket; that padding changes no row is checked at each recording.
            None records every size as it comes.
        batch_buckets: row counts to record; by default 1, 2, 4 … 4096. More rows than the largest
            run plainly. Callables that draw random numbers are recorded at exact sizes.
        max_graphs: how many recordings to keep; the one not used for longest is freed first.
        reuse_outputs: without gradients, return outputs in the graph's own memory instead of new
            tensors. Using one after the next call of its graph raises.
        by_address: arguments (positions or names) that are read and may be written where they
            are, such as a cache: no copy, one recording for each address.
        watch: modules and tensors ``target`` reads that cannot be found in its closure, attributes
            or globals.
        on_unsupported: ``"error"``, or ``"eager"`` to warn once and run ``target`` itself.
        warmup: how many runs go before each recording. Their side effects are put back.

    Returns:
        A :class:`Graphed`; call it as ``target``.

    Raises:
        InputError: an option is out of range.
        UnsupportedError: at a call that no CUDA graph can hold; the message names the line.

    Outputs and gradients are those of ``target``, bit for bit where its kernels are. Without rows
    in the batch, while another graph is being recorded and inside ``torch.compile`` or
    ``torch.func`` the call is ``target``'s own. Numbers stored on modules and Python state are
    recorded as they are at the first call.

    >>> import torch, fastlinear as fl
    >>> layer = torch.nn.Linear(3, 4)
    >>> step = fl.graphed(layer, batch_dim=0)
    >>> if torch.cuda.is_available():
    ...     y = fl.graphed(layer.cuda(), batch_dim=0)(torch.ones(2, 3, device="cuda"))
    """
    if not callable(target) or isinstance(target, Graphed):
        raise InputError("graphed", expected="a module or function", received=type(target).__name__)
    if on_unsupported not in ("error", "eager"):
        raise InputError(
            "graphed",
            expected="on_unsupported to be 'error' or 'eager'",
            received=f"on_unsupported={on_unsupported!r}",
        )
    if max_graphs < 1 or warmup < 1 or (batch_dim is not None and batch_dim < 0):
        raise InputError(
            "graphed",
            expected="max_graphs and warmup of at least 1, batch_dim of at least 0 or None",
            received=f"{max_graphs=}, {warmup=}, {batch_dim=}",
        )
    if batch_buckets is not None and batch_dim is None:
        raise InputError(
            "graphed",
            expected="batch_dim beside batch_buckets",
            received=f"batch_dim=None, batch_buckets={batch_buckets!r}",
            remedy="Name the dimension that holds the rows, usually batch_dim=0.",
        )
    buckets = POWERS_OF_TWO if batch_buckets is None else checked_buckets("graphed", batch_buckets)
    options = _Options(
        batch_dim,
        buckets,
        max_graphs,
        reuse_outputs,
        tuple(by_address),
        on_unsupported == "eager",
        warmup,
    )
    return Graphed(target, options, Watch(target, watch), CudaRecorder())


@dataclass(frozen=True, slots=True)
class _Options:
    batch_dim: int | None
    buckets: tuple[int, ...]
    max_graphs: int
    reuse_outputs: bool
    by_address: tuple[int | str, ...]
    eager: bool
    warmup: int


@dataclass(slots=True)
class Counts:
    """How many calls of a Graphed were recordings, replays and plain calls, and graphs freed."""

    recorded: int = 0
    replayed: int = 0
    plain: int = 0
    freed: int = 0


class Graphed:
    """What :func:`graphed` returns. Attributes of the target are read through it.

    Attributes:
        target: the callable itself.
        counts: what its calls were so far.
    """

    def __init__(
        self, target: Callable[..., Any], options: _Options, watch: Watch, recorder: Recorder
    ) -> None:
        self.target, self.counts = target, Counts()
        self._options, self._watch, self._recorder = options, watch, recorder
        self._busy = recorder.busy
        self._lock = threading.RLock()
        self._graphs: Table[Entry] = Table(options.max_graphs)
        self._plans: dict[Hashable, list[Plan | None]] = {}
        self._pool = Pool()
        self._exact: set[Hashable] = set()  # callables whose rows cannot be compared
        self._warned: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``target(*args, **kwargs)``, by replaying its graph."""
        if (
            _is_compiling()
            or _dispatch_modes()
            or _transforms_active()
            or getattr(_inside, "recording", False)
            or self._busy()
        ):
            return self._plainly(args, kwargs)
        tensors: list[Tensor] = []
        try:
            spec = flatten(args, tensors), flatten(kwargs, tensors) if kwargs else None
        except UnsupportedError as error:
            self._refuse(error)
            return self._plainly(args, kwargs)
        with self._lock:
            plan = self._plan(spec, tensors, args, kwargs)
            if plan is not None:
                self.counts.replayed += 1
                if plan.entry.backward is None:
                    return plan.infer(tensors)
                watched = self._watch.tensors
                saved = [watched[i] for i in plan.entry.saved]
                return plan.train(tensors, self._watch.trainable, saved)
        return self._plainly(args, kwargs)

    def input_buffers(self, *args: Any) -> Any:
        """The buffers that the graph of such a call reads, in the structure of ``args``.

        Fill them in place and pass them: what already lies in a buffer is not copied. They are
        for calls of this shape without gradients, until the graph is freed.
        """
        tensors: list[Tensor] = []
        spec = flatten(args, tensors)
        with self._lock:
            plan = self._plan((spec, None), tensors, args, {})
        if plan is None:
            return args
        return rebuild(spec, iter(plan.buffers(tensors)))

    def clear(self) -> None:
        """Free every graph and its memory."""
        with self._lock:
            self._drop(self._graphs.make_room(self._options.max_graphs))
            self._plans.clear()

    def train(self, mode: bool = True) -> Graphed:
        """Switch the module to training, or not; returns this object."""
        self.target.train(mode)  # type: ignore[attr-defined]
        return self

    def eval(self) -> Graphed:
        """Switch the module to evaluation; returns this object."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "target" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.target, name)

    def __reduce__(self) -> Any:
        raise InputError(
            "graphed",
            expected="graphs to stay in the process that recorded them",
            received="an attempt to copy or pickle a Graphed",
            remedy="Copy its target and graph the copy.",
        )

    def __repr__(self) -> str:
        return f"Graphed({self.target!r}, graphs={len(self._graphs)})"

    # ----------------------------------------------------------------------------------------
    # From a call to its plan

    def _plan(
        self, spec: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan | None:
        """The plan for a call, None to run it plainly."""
        watch = self._watch
        if not watch.unchanged():
            watch.renew()
        mode = (
            _grad_enabled() and (bool(watch.trainable) or any(t.requires_grad for t in tensors)),
            watch.token,
            float32_precision(),
            _deterministic(),
            self._autocast() if _any_autocast() else None,
        )
        facts = [
            (
                t.shape,
                t.dtype,
                t.device,
                t.is_contiguous() or t.stride(),
                t.requires_grad,
                t.is_neg(),
            )
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
                return plan
        try:
            found = self._resolve(key, spec, mode, facts, tensors, places)
        except UnsupportedError as error:
            self._refuse(error)
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
        if any(t.numel() == 0 for t in tensors):
            return None
        dim, rows, bucket = self._options.batch_dim, None, None
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
        return Plan(entry, tensors, rows if bucket else None, self._options.reuse_outputs)

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
        twin = 0
        while (found := self._graphs.get((base, twin))) is not None:
            if not found.busy():
                return found
            twin += 1
        self._drop(self._graphs.make_room())
        entry = Entry((base, twin), self._options.batch_dim or 0, bucket, padded)

        def run(given: Sequence[Tensor]) -> Any:
            held = iter(given)
            args = rebuild(spec[0], held)
            return self.target(*args, **(rebuild(spec[1], held) if spec[1] else {}))

        pool = Pool() if grad else self._pool
        _inside.recording = True
        try:
            record(
                entry,
                run,
                tensors,
                places,
                self._watch,
                self._recorder,
                pool,
                grad,
                self._options.warmup,
            )
        finally:
            _inside.recording = False
        self.counts.recorded += 1
        self._graphs.put(entry.key, entry)
        return entry

    def _drop(self, entries: list[Entry]) -> None:
        """Let go of graphs; one whose backward may still come lives until that has run."""
        if not entries:
            return
        self._recorder.settle(entries[0].device)
        gone = set(map(id, entries))
        self.counts.freed += len(entries)
        self._plans = {
            k: kept
            for k, plans in self._plans.items()
            if (kept := [p for p in plans if p is None or id(p.entry) not in gone])
        }

    def _check(self, tensors: list[Tensor]) -> None:
        """Raise UnsupportedError where no graph can serve such tensors or the target."""
        kind = self._recorder.device_type
        why = self._watch.reason_not(kind)
        devices = {t.device for t in [*tensors, *self._watch.tensors] if t.dim()}
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
                expected=f"dense tensors on one {kind} device and a target without hooks",
                received=why,
                remedy="Move them there, or pass on_unsupported='eager'.",
            )

    def _refuse(self, error: UnsupportedError) -> None:
        if not self._options.eager:
            raise error
        text = str(error)
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"graphed runs its target plainly: {text}", stacklevel=4)

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.counts.plain += 1
        return self.target(*args, **kwargs)

    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self._recorder.device_type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
