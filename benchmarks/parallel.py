"""Measuring by many processes on a machine's like GPUs: kernels are compiled side by side, and
timed one at a time on each GPU."""

from __future__ import annotations

import os
import queue
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from fastlinear.calibration import measure

_SHARE = 1.4  # of the memory, of all processes together: few need theirs at once
_GRACE_S = 10.0
_LOOK_S = 0.5
_PATIENCE_S = 120.0  # with a process that ended without a word
T = TypeVar("T")


class _Turns:
    """Of the processes on a GPU one times while no other uses it, or many prepare."""

    def __init__(self, context: Any) -> None:
        self._changed = context.Condition()
        self._preparing, self._waiting, self._timing = (context.RawValue("i", 0) for _ in range(3))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Others prepare as well; who waits to time comes first."""
        with self._changed:
            busy = self._waiting, self._timing
            self._changed.wait_for(lambda: not any(b.value for b in busy), _PATIENCE_S)
            self._preparing.value += 1
        try:
            yield
        finally:
            with self._changed:
                self._preparing.value -= 1
                self._changed.notify_all()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Nobody else does anything."""
        with self._changed:
            self._waiting.value += 1
            busy = self._preparing, self._timing
            self._changed.wait_for(lambda: not any(b.value for b in busy), _PATIENCE_S)
            self._waiting.value -= 1
            self._timing.value = 1
        try:
            yield
        finally:
            with self._changed:
                self._timing.value = 0
                self._changed.notify_all()


def measured(
    work: Callable[[T, torch.device], Any],
    tasks: Callable[[], Iterable[T]],
    *,
    device: str,
    jobs: int,
    end: float = float("inf"),
) -> Iterator[tuple[T, Any, str]]:
    """Each task, what ``work`` found, and why it found nothing; in the order they finish.

    Args:
        work: measures a task on a device, which it times inside ``measure.exclusive``; of what it
            does inside ``measure.preparing`` times are free.
        tasks: makes all tasks, in every process again. They may have no end.
        device: a type of device; the processes take turns at its indices.
        jobs: processes; at least one for each GPU.
        end: begin no task after this ``time.time()``, and leave those that run soon after.
    """
    context = get_context("spawn")
    found: Any = context.Queue()
    count = torch.cuda.device_count() if device == "cuda" else 1
    jobs = max(jobs, count)
    turns = [_Turns(context) for _ in range(count)]
    how = (jobs, count, device, turns, end, found)
    running = [
        context.Process(target=_process, args=(work, tasks, i, *how), daemon=True)
        for i in range(jobs)
    ]
    for process in running:
        process.start()
    try:
        while time.time() < end + _GRACE_S:
            alive = any(process.is_alive() for process in running)
            try:
                yield found.get(timeout=_LOOK_S)
            except queue.Empty:
                if not alive:
                    return
    finally:
        for process in running:
            process.terminate()  # one that compiles still


def _process(
    work: Callable[[Any, torch.device], Any],
    tasks: Callable[[], Iterable[Any]],
    index: int,
    jobs: int,
    devices: int,
    device: str,
    turns: list[_Turns],
    end: float,
    found: Any,
) -> None:
    warnings.simplefilter("ignore")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the processes are many
    place = torch.device(device, index % devices)
    if device == "cuda":
        torch.cuda.set_device(place)
        torch.cuda.set_per_process_memory_fraction(min(1.0, _SHARE * devices / jobs))
    measure.exclusive = turns[index % devices].timing
    measure.preparing = turns[index % devices].preparing
    for task in islice(tasks(), index, None, jobs):
        if time.time() > end:
            return
        try:
            found.put((task, work(task, place), ""))
        except Exception as error:  # noqa: BLE001 - the other tasks go on
            found.put((task, None, f"{type(error).__name__}: {str(error).strip()[:300]}"))
        if device == "cuda":
            torch.cuda.empty_cache()
