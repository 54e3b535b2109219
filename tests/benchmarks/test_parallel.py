"""Processes on one device: many prepare at a time, one times while nobody else works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

import torch

from benchmarks.parallel import measured
from fastlinear.calibration import measure

Spans = list[float]
_GAP_S = 0.03  # how late a process may be when it is stopped or goes on
_TIMED_S = 0.15


def worked(seconds: float) -> Spans:
    """When this process was at work."""
    seen = [time.monotonic()]
    while seen[-1] < seen[0] + seconds:
        time.sleep(0.001)
        seen.append(time.monotonic())
    return seen


def task(number: int, device: torch.device) -> tuple[int, Spans, Spans]:
    if number == 3:
        raise ValueError("of no use")
    prepared = worked(0.4)
    with measure.exclusive(), measure.undisturbed():
        return os.getpid(), prepared, worked(_TIMED_S)


def tasks() -> Iterable[int]:
    return range(12)


def dies(number: int, device: torch.device) -> int:
    if number == 0:
        with measure.exclusive(), measure.undisturbed():
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    with measure.exclusive():
        return number


def test_one_times_while_nobody_else_works() -> None:
    found = list(measured(task, tasks, device="cpu", jobs=3, end=time.time() + 120))
    assert sorted(number for number, _, _ in found) == list(range(12))
    assert [why for number, _, why in found if number == 3] == ["ValueError: of no use"]
    rows = [row for number, row, _ in found if number != 3]
    assert len({pid for pid, _, _ in rows}) == 3
    stopped = 0
    for pid, _, (begin, *_, end) in rows:
        inside = begin + _GAP_S, end - _GAP_S
        for other, prepared, timed in rows:
            if other != pid:
                assert not any(inside[0] < at < inside[1] for at in (*prepared, *timed))
                stopped += prepared[0] < begin and end < prepared[-1]
    assert stopped, "of a process that prepared and was stopped meanwhile"


def test_the_others_go_on_if_one_is_gone() -> None:
    found = list(measured(dies, tasks, device="cpu", jobs=3, end=time.time() + 120))
    assert sorted(number for number, _, _ in found) == [n for n in range(12) if n % 3]
