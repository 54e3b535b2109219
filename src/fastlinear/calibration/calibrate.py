"""Calibration: drawn calls are measured for some seconds, and the prices they tell are kept."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastlinear.calibration import drawn, ways
from fastlinear.calibration.fit import MICROSECONDS, NUMBERS, Call, fit, moved
from fastlinear.calibration.measure import (
    ALONE,
    calls_of_pieces,
    calls_of_ways,
    measure_pieces,
    measure_ways,
)
from fastlinear.core import files
from fastlinear.core.device import device_facts
from fastlinear.core.environment import environment
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.progress import Progress, silent
from fastlinear.dispatch import cache, prices
from fastlinear.dispatch.backend import WIDENED
from fastlinear.dispatch.prices import Price, Prices, name_of
from fastlinear.dispatch.work import FRESH

_MODES = (drawn.INFERENCE, drawn.TRAINING)
_QUICK = {"cpu": drawn.Limit(3e8, 1 << 25), "cuda": drawn.Limit(3e11, 1 << 30)}
"""The most of a case in ten seconds: many small ones tell more than few large ones."""
_COMMON = (FRESH, WIDENED)
_FRESH_LOG_US = -8.3  # a byte of new memory, where nobody measured it
_WAYS_OF = 4  # of so many cases one is measured as whole calls


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found.

    Attributes:
        prices: those now in use.
        calls: how many calls were measured.
        off_before, off_after: the median of |log(predicted / measured)| over them, by the prices
            before and by those now; NaN where there were none before.
        path: where they are kept.
    """

    prices: Prices
    calls: int
    off_before: float
    off_after: float
    path: Path


def calibrate(
    device: torch.device | str = "cpu",
    *,
    seconds: float = 10.0,
    seed: int = 0,
    rows: Path | None = None,
    progress: Progress = silent,
) -> Calibrated:
    """Measure, fit, and write the prices to the user's cache.

    Args:
        device: a GPU, or a CPU, whose threads are those torch has.
        seconds: how long to measure.
        seed: draws the calls.
        rows: a file for what was measured, one JSON object a line.
        progress: told of every case.

    Raises:
        UnsupportedError: the cache cannot be written.
    """
    where = torch.device(device)
    facts = device_facts(where)
    before = prices.shipped(facts)
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():  # events are its own
        pieces, whole = _rows(where, seconds, seed, progress)
    if rows is not None:
        header = {"device": facts.slug, "traits": prices.traits(facts), "env": environment(where)}
        rows.write_text("".join(json.dumps(row) + "\n" for row in (header, *pieces, *whole)))
    calls = [*calls_of_pieces(pieces)]
    more = [*calls_of_ways(whole)]
    found = from_calls(calls, more, facts.slug, before, facts.kind)
    path = prices.own_path(facts)
    try:
        files.make_folder(path.parent)
        files.replace(path, json.dumps(found.to_json()).encode())
    except OSError as error:
        raise UnsupportedError(
            "calibrate",
            "a cache folder that can be written",
            str(error),
            "Set FASTLINEAR_CACHE_DIR to another folder.",
        ) from error
    prices.forget()
    cache.changed()
    every = [*calls, *more]
    return Calibrated(found, len(every), _off(before, every), _off(found, every), path)


def _has(one: Call, kind: str) -> bool:
    return any(w.kind == kind for w in one.works)


def from_calls(
    pieces: Sequence[Call],
    whole: Sequence[Call],
    device: str,
    before: Prices | None = None,
    kind: str = "cpu",
) -> Prices:
    """Prices from calls of pieces and whole calls together: only both tell what a small call's
    numbers cost from what the call costs. Of a GPU (``kind="cuda"``) pieces tell the device's part,
    whole calls the host's."""
    every, pull = [*pieces, *whole], MICROSECONDS if kind == "cuda" else NUMBERS
    known = None if before is None else moved(before, every, pull)
    if kind == "cuda":
        return fit(every, device, known, pull=pull)
    start = {name_of(FRESH, dtype): Price(_FRESH_LOG_US) for dtype in FLOAT_DTYPES}
    found = Prices(device, start if known is None else {**start, **known.by_kind})
    # what many kinds have in common comes after them: one after the other they are small problems
    native = [one for one in every if not _has(one, WIDENED)]
    found = fit(native, device, found, lambda kind: kind not in _COMMON)
    for common in _COMMON:
        if with_it := [one for one in every if _has(one, common)]:
            found = fit(with_it, device, found, partial(eq, common))
    return replace(found, by_kind=_called(found.by_kind))


def _called(alone: Mapping[str, Price]) -> dict[str, Price]:
    """Prices of calls, where there are none, as those of the same made from Python alone."""
    found = dict(alone)
    for name, price in alone.items():
        dtype, _, kind = name.partition(" ")
        if kind.startswith(ALONE):
            found.setdefault(f"{dtype} {kind.removeprefix(ALONE)}", price)
    return found


def _limit(kind: str, seconds: float) -> drawn.Limit:
    """The most of a case: in proportion to the time, as far as cases are drawn."""
    quick, most, times = _QUICK[kind], drawn.LIMITS[kind], max(1.0, seconds / 10)
    return drawn.Limit(min(most.flops, quick.flops * times), min(most.bytes, quick.bytes * times))


def _rows(
    device: torch.device, seconds: float, seed: int, progress: Progress
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of pieces and of whole calls, family after family until the time is over."""
    pieces: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    ways.wait()
    begin, limit = time.monotonic(), _limit(device.type, seconds)
    for turn in count():
        for name, mode in product(drawn.FAMILIES, _MODES):
            spent = time.monotonic() - begin
            if spent > seconds:
                return pieces, whole
            progress("measuring drawn calls", int(spent * 10), int(seconds * 10))
            case = drawn.case(name, seed, turn, device.type, mode, limit=limit)
            if turn % _WAYS_OF == _WAYS_OF - 1:
                whole.append(measure_ways(case, device))
            else:
                pieces += measure_pieces(case, device)
    raise AssertionError("the turns have no end")


def _off(known: Prices | None, calls: Sequence[Call]) -> float:
    if known is None:
        return float("nan")
    told = [(known.predict(one.works, one.dtype), one.us) for one in calls]
    return float(np.median([abs(np.log(p.us / us)) for p, us in told if p is not None] or [np.nan]))
