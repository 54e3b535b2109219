"""What the profiler saw, reduced to the few facts attribution needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn.modules import module as module_hooks

from fastlinear.core.interrupts import whole

MODULE = "fastlinear::module::"
STEP = "fastlinear::step"
LOSS = "fastlinear::loss"
BACKWARD = "fastlinear::backward"
EVALUATE = "autograd::engine::evaluate_function: "


def readable(name: str) -> str:
    """A module's name as the profiler can take it: halves of surrogate pairs are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


_Range = torch._C._profiler._RecordFunctionFast
_ANNOTATIONS = ("user_annotation", "gpu_user_annotation")
_RUNTIME = ("cuda_runtime", "cuda_driver", "overhead")


@dataclass(frozen=True)
class Event:
    """One profiler event.

    Attributes:
        kind: ``"op"`` (host op, autograd node or range), ``"runtime"`` (host call that launches
            work) or ``"device"`` (kernel, copy or fill on the device).
        name: as the profiler has it.
        start_ns, end_ns: on one clock for all kinds.
        thread: the profiler's number of the host thread; 0 for device events.
        id: an op's correlation id; for runtime and device events the driver's, which both share.
        link: id of the op that caused a runtime or device event, 0 if none is known.
        sequence: the op's autograd sequence number, -1 if none.
        forward_thread: for autograd nodes the thread of the forward op, else 0.
    """

    kind: str
    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    id: int = 0
    link: int = 0
    sequence: int = -1
    forward_thread: int = 0

    @property
    def ns(self) -> int:
        """Duration."""
        return self.end_ns - self.start_ns


def from_kineto(raw: Any) -> list[Event]:
    """The events of a finished torch profiler: ``kineto_results.events()``.

    Hidden and asynchronous events and the device's mirror images of host ranges are left out.
    """
    events = []
    for e in raw:
        hidden = getattr(e, "is_hidden_event", None)
        activity = getattr(e, "activity_type", lambda: "")()
        if (hidden is not None and hidden()) or e.duration_ns() < 0:
            continue
        if e.device_type() != DeviceType.CPU:
            if e.is_user_annotation() or activity in _ANNOTATIONS or e.name().startswith(MODULE):
                continue
            kind = "device"
        elif activity in _RUNTIME or (not activity and e.name().startswith("cu")):
            kind = "runtime"
        elif e.is_async():
            continue
        else:
            kind = "op"
        events.append(
            Event(
                kind=kind,
                name=e.name(),
                start_ns=e.start_ns(),
                end_ns=e.start_ns() + e.duration_ns(),
                thread=0 if kind == "device" else e.start_thread_id(),
                id=e.correlation_id(),
                link=e.linked_correlation_id(),
                sequence=e.sequence_nr(),
                forward_thread=e.fwd_thread_id(),
            )
        )
    return events


@whole
def module_ranges(names: dict[nn.Module, str], on_instances: bool = False) -> Iterator[None]:
    """Open a profiler range around every call of the named modules.

    Uses torch's process-wide module hooks, which leave no mark on an instance (some modules take
    another path as soon as an instance has hooks) and are removed on leaving. ``on_instances``
    uses the instances' own: compiled parts would trace process-wide ones.
    """
    open_ranges: list[tuple[nn.Module, Any]] = []

    def enter(module: nn.Module, args: Any) -> None:
        name = names.get(module)
        if name is not None:
            span = _Range(MODULE + readable(name))
            span.__enter__()
            open_ranges.append((module, span))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        # After an exception the hooks of inner modules may be skipped: close theirs as well.
        if module in names and any(m is module for m, _ in open_ranges):
            while True:
                owner, span = open_ranges.pop()
                span.__exit__(None, None, None)
                if owner is module:
                    return

    homes: list[Any] = [m for m in names if on_instances]
    handles: list[Any] = []
    try:
        for m in homes:
            handles.append(m.register_forward_pre_hook(enter, prepend=True))
            handles.append(m.register_forward_hook(leave, always_call=True))
        if not on_instances:
            handles.append(module_hooks.register_module_forward_pre_hook(enter))
            handles.append(module_hooks.register_module_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_ranges:
            open_ranges.pop()[1].__exit__(None, None, None)


@contextmanager
def span(name: str) -> Iterator[None]:
    """A profiler range with little cost of its own."""
    with _Range(name):
        yield


@whole
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from writing its own log lines to stderr."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]
