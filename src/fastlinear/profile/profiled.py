"""A step under torch's profiler, and its time by module and op."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn
from torch.autograd.profiler import profile as autograd_profiler

from fastlinear.core.interrupts import Whole, whole
from fastlinear.profile.attribute import (
    ENGINE,
    IN_LOSS,
    LOSS_BACKWARD,
    Attribution,
    Owner,
    attribute,
)
from fastlinear.profile.events import (
    BACKWARD,
    LOSS,
    STEP,
    from_kineto,
    quiet_profiler,
    readable,
    span,
)
from fastlinear.profile.records import Record
from fastlinear.profile.step import Step

Ranges = Callable[[], AbstractContextManager[None]]
"""Marks every module's call while it is open."""


def profiled(
    step: Step, device: torch.device, steps: int, ranges: Ranges, warm: bool
) -> Attribution:
    """The least disturbed of ``steps`` profiled steps; ``warm``: after one for the profiler itself.

    That is the one with the least kernel time on CUDA, the least host time on a CPU: whatever
    else the machine does can only add to either.
    """
    # torch.profiler.profile, which wraps this class, first imports all of Inductor: seconds.
    cuda = device.type == "cuda"
    session = partial(autograd_profiler, use_kineto=True, use_device="cuda" if cuda else None)
    seen = []
    with quiet_profiler(), _no_garbage_collection():
        for _ in range(steps + warm):
            with Whole(session()) as prof, ranges():
                _marked_step(step)
                if cuda:
                    torch.cuda.synchronize(device)
            assert prof.kineto_results is not None
            seen.append(attribute(from_kineto(prof.kineto_results.events())))
    return min(seen[int(warm) :], key=lambda a: a.total_ns(cuda))


@whole
def _no_garbage_collection() -> Iterator[None]:
    """Python's collector pauses at random; its pause would be charged to some module."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _marked_step(step: Step) -> None:
    if step.train:
        step.drop_grads()
    with span(STEP):
        output = step.forward()
        if not step.train:
            return
        with span(LOSS):
            loss = step.loss(output)
        with span(BACKWARD):
            step.backward(loss)


def _outside(owner: Owner) -> str:
    """What time that no module holds is called: by what it is part of, where that is known."""
    phase = owner.direction in (IN_LOSS, LOSS_BACKWARD) and owner.op != ENGINE
    return owner.direction if phase else owner.op


def records_of(
    model: nn.Module, found: Attribution, step_us: float, device: str
) -> tuple[tuple[Record, ...], tuple[tuple[str, float], ...]]:
    """(records, unattributed), both per step and largest first."""
    modules = {readable(name): (name, type(m).__name__) for name, m in model.named_modules()}
    profiled_us = found.step_ns / 1e3
    scale = step_us / profiled_us if profiled_us else 1.0
    records: list[Record] = []
    rest: dict[str, float] = defaultdict(float)
    for owner, times in found.times.items():
        cpu_us = times.cpu_ns / 1e3 * scale
        device_us = times.device_ns / 1e3
        if owner.fqn is None:
            rest[_outside(owner)] += device_us if device == "cuda" else cpu_us
            continue
        name, module_class = modules[owner.fqn]
        records.append(
            Record(
                fqn=name,
                module_class=module_class,
                op=owner.op,
                direction=owner.direction,
                calls=times.calls,
                cpu_us=cpu_us,
                device_us=device_us,
            )
        )
    records.sort(key=lambda r: (-r.device_us, -r.cpu_us, r.fqn, r.op))
    named = sorted(rest.items(), key=lambda item: -item[1])
    return tuple(records), tuple((name, us) for name, us in named if us > 0)
