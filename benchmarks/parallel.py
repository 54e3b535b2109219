"""Measuring by many processes on a machine's like GPUs: kernels are compiled side by side, and
timed one at a time on each GPU. Who needs a quiet machine has the other processes stopped."""

from __future__ import annotations

import os
import queue
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

import torch

from fastlinear.calibration import measure

_SHARE = 1.4  # of the memory, of all processes together: few need theirs at once
_GRACE_S = 10.0
_LOOK_S = 0.5
_PATIENCE_S = 20.0
_SETTLE_S = 0.05  # what a GPU still does for processes that were stopped
T = TypeVar("T")


class _Turns:
    """The processes on one GPU, of which one at a time measures."""

    def __init__(self, context: Any, jobs: int) -> None:
        self._lock = context.Lock()
        self._groups = context.RawArray("i", jobs)
        self._holder = context.RawValue("i", 0)
        self._stopped = context.RawValue("d", 0.0)

    def join(self, index: int) -> None:
        """Called by each process first; not before who measures has finished."""
        os.setpgrp()  # with the compilers that it starts
        with self._lock:
            self._groups[index] = os.getpid()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other process measures."""
        with self._lock:
            self._holder.value = os.getpid()
            try:
                yield
            finally:
                self._holder.value = 0

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside ``exclusive``: the others do not do anything else either, they are stopped. What
        is called here has to wait for none of them: it has run before."""
        self._stopped.value = time.monotonic()
        self._signal(signal.SIGSTOP)
        time.sleep(_SETTLE_S)
        try:
            yield
        finally:
            self._stopped.value = 0.0
            self._signal(signal.SIGCONT)

    def mend(self) -> None:
        """Let the others go on if the one that measures is gone, or may wait for one of them."""
        holder, stopped = self._holder.value, self._stopped.value
        gone = holder and not _runs(holder) and holder == self._holder.value
        if gone or (stopped and time.monotonic() - stopped > _PATIENCE_S):
            self._signal(signal.SIGCONT)
        if gone:
            self._holder.value, self._stopped.value = 0, 0.0
            self._lock.release()

    def end(self) -> None:
        """End all processes, one that compiles still too."""
        self._signal(signal.SIGKILL)

    def _signal(self, sent: signal.Signals) -> None:
        for group in self._groups:
            if group and group != os.getpid():
                with suppress(ProcessLookupError):
                    os.killpg(group, sent)


def _runs(pid: int) -> bool:
    return any(process.pid == pid for process in active_children())


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
        work: measures a task on a device, and times it inside ``measure.exclusive``, and there
            inside ``measure.undisturbed`` if what other processes do would disturb it.
        tasks: makes all tasks, in every process again. They may have no end.
        device: a type of device; the processes take turns at its indices.
        jobs: processes; at least one for each GPU.
        end: begin no task after this ``time.time()``, and leave those that run soon after.
    """
    context = get_context("spawn")
    found: Any = context.Queue()
    count = torch.cuda.device_count() if device == "cuda" else 1
    jobs = max(jobs, count)
    turns = [_Turns(context, jobs) for _ in range(count)]
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
                for each in turns:
                    each.mend()
    finally:
        for each in turns:
            each.end()
        for process in running:
            process.kill()  # one that has not joined yet


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
    mine = turns[index % devices]
    mine.join(index)
    measure.exclusive, measure.undisturbed = mine.exclusive, mine.undisturbed
    for task in islice(tasks(), index, None, jobs):
        if time.time() > end:
            return
        try:
            found.put((task, work(task, place), ""))
        except Exception as error:  # noqa: BLE001 - the other tasks go on
            found.put((task, None, f"{type(error).__name__}: {str(error).strip()[:300]}"))
        if device == "cuda":
            torch.cuda.empty_cache()
