"""Processes on one device: many prepare at a time, one times while nobody else works."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import torch

from benchmarks.parallel import measured
from fastlinear.calibration import measure

Span = tuple[float, float]


def task(number: int, device: torch.device) -> tuple[int, Span, Span]:
    if number == 3:
        raise ValueError("of no use")
    spans = []
    for phase in (measure.preparing, measure.exclusive):
        with phase():
            begin = time.monotonic()
            time.sleep(0.05)
            spans.append((begin, time.monotonic()))
    return os.getpid(), *spans


def tasks() -> Iterable[int]:
    return range(12)


def test_one_times_while_nobody_else_works() -> None:
    found = list(measured(task, tasks, device="cpu", jobs=3, end=time.time() + 120))
    assert sorted(number for number, _, _ in found) == list(range(12))
    assert [why for number, _, why in found if number == 3] == ["ValueError: of no use"]
    rows = [row for number, row, _ in found if number != 3]
    assert len({pid for pid, _, _ in rows}) == 3
    timed = [row[2] for row in rows]
    for i, (begin, end) in enumerate(timed):
        others = [row[1] for row in rows] + timed[:i] + timed[i + 1 :]
        assert all(last <= begin or end <= first for first, last in others)
    prepared = [row[1] for row in rows]
    assert any(a[0] < b[0] < a[1] for a in prepared for b in prepared), "some prepare side by side"
