"""What one call runs, one after the other: kernels on a device, PyTorch's operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.profiler import profile as autograd_profiler

from fastlinear.profile.events import EVALUATE, STEP, Event, from_kineto, quiet_profiler, span

_WARM, _CALLS = 2, 3
_HOLDERS = (EVALUATE, STEP, "torch::autograd::")


@dataclass(frozen=True)
class Timeline:
    """One call, the shortest of a few.

    Attributes:
        us: from the start of the first to the end of the last; on a CPU the call's own time.
        spans: (name, start, length) of each kernel or operation, microseconds from the start. What
            runs without PyTorch's dispatcher, such as a fused pass in C++, leaves a gap on a CPU.
    """

    us: float
    spans: tuple[tuple[str, float, float], ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {"us": self.us, "spans": [list(s) for s in self.spans]}


def timeline(run: Callable[[], object], device: torch.device) -> Timeline:
    """Run a call a few times under the profiler, and keep the shortest."""
    cuda = device.type == "cuda"
    session = partial(autograd_profiler, use_kineto=True, use_device="cuda" if cuda else None)
    for _ in range(_WARM):
        run()
    found = []
    with quiet_profiler():
        for _ in range(_CALLS):
            if cuda:
                torch.cuda.synchronize(device)
            with session() as prof:
                with span(STEP):
                    run()
                if cuda:
                    torch.cuda.synchronize(device)
            assert prof.kineto_results is not None
            events = from_kineto(prof.kineto_results.events())
            found.append(_kernels(events) if cuda else _operations(events))
    return min(found, key=lambda t: t.us)


def _kernels(events: list[Event]) -> Timeline:
    kernels = sorted((e for e in events if e.kind == "device"), key=lambda e: e.start_ns)
    if not kernels:
        return Timeline(0.0, ())
    return _timeline(kernels, kernels[0].start_ns, max(e.end_ns for e in kernels))


def _operations(events: list[Event]) -> Timeline:
    """The outermost operations inside the call, of all threads; autograd's nodes hold some."""
    (call,) = (e for e in events if e.name == STEP)
    inner = (
        e
        for e in events
        if e.kind == "op"
        and "::" in e.name
        and not e.name.startswith(_HOLDERS)
        and call.start_ns <= e.start_ns < call.end_ns
    )
    ends: dict[int, int] = {}
    kept = []
    for e in sorted(inner, key=lambda e: (e.start_ns, -e.end_ns)):
        if e.start_ns >= ends.get(e.thread, 0):
            ends[e.thread] = e.end_ns
            kept.append(e)
    return _timeline(kept, call.start_ns, call.end_ns)


def _timeline(events: list[Event], start: int, end: int) -> Timeline:
    spans = ((e.name, (e.start_ns - start) / 1e3, e.ns / 1e3) for e in events)
    return Timeline((end - start) / 1e3, tuple(spans))
