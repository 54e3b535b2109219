"""Measures drawn calls for calibration: quickly, a few repetitions each, nothing verified.

Two kinds of rows. A row of *pieces* has each backend's function alone, timed from Python. A row of
*ways* has whole calls as callers make them, every way of ``ways.ours`` and PyTorch's autograd, with
what each took. Pieces tell what work costs, ways what the host pays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fastlinear.calibration import ways
from fastlinear.calibration.drawn import Drawn
from fastlinear.calibration.fit import Call
from fastlinear.core.errors import FastlinearError
from fastlinear.core.problem import Problem
from fastlinear.core.timing import recorded
from fastlinear.dispatch.backend import Backend, family
from fastlinear.dispatch.roofline import on_device
from fastlinear.dispatch.steps import STEP
from fastlinear.dispatch.tune import input_sets
from fastlinear.dispatch.work import ANY, CALL, FRESH, HOST, KEPT, Work, dtype_of, host

Row = dict[str, Any]
ALONE = "alone "
"""How kinds of calls begin that Python makes by itself."""
_SAMPLE_NS = 150_000
_LEAST, _MOST, _WITHIN_S = 5, 9, 0.006
_MOST_SETS, _LEAST_CALLS = 24, 16
_MOST_REPLAYS, _ALIKE = 30, 1.03
exclusive: Callable[[], AbstractContextManager[object]] = nullcontext
"""Entered while a GPU is timed or has long work: processes that share one put a lock here."""
undisturbed: Callable[[], AbstractContextManager[object]] = nullcontext
"""Entered inside that where the host is timed too: the other processes must not run meanwhile."""
_COMPOSED = ("pieces", "layerwise")  # of what other Problems choose


def pieces_of(p: Problem) -> list[Problem]:
    """The Problems that a call's backends are timed on alone; none where a training call is chosen
    as one, of which Python is a large part."""
    known = family(p.family)
    if not p.needs_grad:
        return [p]
    parts = [q for q in known.pieces if q != STEP]
    if parts == ["forward"]:
        return [] if p.device == "cpu" else [p, p.with_piece(STEP)]
    if p.device == "cpu" and len(parts) > 2:
        parts.remove("backward")  # its pieces stand for it
    return [p.with_piece(q) for q in parts]


def measure_pieces(drawn: Drawn, device: torch.device, pieces: Sequence[str] = ()) -> Iterator[Row]:
    """A row for each piece of a case: on a CPU what a call takes, on a GPU what it takes there.

    Args:
        pieces: only these; all if not given.
    """
    for p in pieces_of(drawn.problem):
        if pieces and p.piece not in pieces:
            continue
        make = partial(family(p.family).make_inputs, p, device)
        with exclusive():
            sets = [make(drawn.inputs_seed)]
            if device.type == "cuda":
                more = range(1, min(_MOST_SETS, input_sets(p, sets[0])))
                sets += [make(drawn.inputs_seed + turn) for turn in more]
                torch.cuda.synchronize(device)
        us = {}
        for backend in family(p.family).candidates(p.piece):
            if backend.name in _COMPOSED or backend.why_not_ready(p) is not None:
                continue
            with torch.no_grad():
                if device.type == "cpu":
                    us[backend.name] = quick_us(partial(backend.load(p), *sets[0]))
                elif (found := _device_us(backend, p, sets, device)) is not None:
                    us[backend.name] = found
        yield {"problem": p.to_json(), "us": us}


def measure_ways(drawn: Drawn, device: torch.device) -> Row:
    """A row of every way to compute a case, and of PyTorch's own."""
    arguments, dy = ways.inputs_of(drawn, device, 0)
    train = drawn.problem.needs_grad
    found = []
    with nullcontext() if train else torch.no_grad():
        every = [*ways.ours(drawn, arguments), *ways.peers(drawn, arguments, (ways.COMPILE,))]
        for way in every:
            try:
                us = quick_us(ways.runner(way, arguments, dy, train))
            except FastlinearError:
                continue
            took = {STEP: ways.EAGER} if way.name == ways.EAGER else dict(way.took)
            found.append({"took": took, "us": us})
    return {"problem": drawn.problem.to_json(), "ways": found}


def _device_us(
    backend: Backend, p: Problem, sets: Sequence[tuple[Any, ...]], device: torch.device
) -> float | None:
    """``device_us``; None of a backend that fails, for want of memory, for example."""
    try:
        return device_us(backend.load(p), sets, device)
    except (RuntimeError, FastlinearError):
        return None


def device_us(
    run: Callable[..., Any], sets: Sequence[tuple[Any, ...]], device: torch.device
) -> float | None:
    """Microseconds that a GPU takes for a call: the second least of a few replays of a CUDA graph,
    which rotates over inputs, or of more until another is as quick: other processes may warm up
    meanwhile. None where it cannot be captured."""
    for _ in range(2):
        run(*sets[0])
    torch.cuda.synchronize(device)
    turns = max(1, math.ceil(_LEAST_CALLS / len(sets)))
    with exclusive():

        def calls() -> None:
            for _ in range(turns):
                for inputs in sets:
                    run(*inputs)

        graph = recorded(calls, device)
        if graph is None:
            return None
        samples: list[float] = []
        while len(samples) < _MOST_REPLAYS and not (len(samples) >= _LEAST and _agree(samples)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / (turns * len(sets)))
    return round(sorted(samples)[1], 3)


def _agree(samples: list[float]) -> bool:
    least, second = sorted(samples)[:2]
    return second <= _ALIKE * least


def quick_us(run: Callable[[], Any]) -> float:
    """Microseconds of a call: the second least of a few samples, after warm calls."""
    for _ in range(3):  # a kind of call is recorded when it comes again
        begin = time.perf_counter_ns()
        run()
        once = time.perf_counter_ns() - begin
    inner = max(1, min(100, _SAMPLE_NS // max(once, 1)))
    samples: list[float] = []
    end = time.perf_counter() + _WITHIN_S
    while len(samples) < _LEAST or (len(samples) < _MOST and time.perf_counter() < end):
        begin = time.perf_counter_ns()
        for _ in range(inner):
            run()
        samples.append((time.perf_counter_ns() - begin) / 1e3 / inner)
    return round(sorted(samples)[1], 3)


# --------------------------------------------------------------------------------------------
# Rows as calls of known work


def alone(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work where its function is called from Python, by itself: calls cost more so, and
    have no memory that was kept. On a GPU it ran inside a CUDA graph."""
    p = replace(p, captured=p.device == "cuda")
    made = family(p.family).work_of(p, backend)
    if made is None:
        return None
    if p.device == "cuda":  # what was timed is the device
        return on_device(made)

    def told(w: Work) -> Work:
        if w.kind.endswith((HOST, CALL)):
            return replace(w, kind=f"{ALONE}{w.kind}")
        return replace(w, kind=FRESH) if w.kind == KEPT else w

    return tuple(map(told, made))


def calls_of_pieces(rows: Iterable[Mapping[str, Any]]) -> Iterator[Call]:
    """Rows of ``measure_pieces`` as calls."""
    for row in rows:
        p = Problem.from_json(row["problem"])
        if p.piece == STEP and p.device == "cpu":  # a large part of it is Python
            continue
        for backend, us in row["us"].items():
            works = alone(p, backend)
            if works:
                yield Call(works, dtype_of(p), us)


def calls_of_ways(rows: Iterable[Mapping[str, Any]]) -> Iterator[Call]:
    """Rows of ``measure_ways`` as calls, but for what is composed of other Problems' choices."""
    for row in rows:
        p = Problem.from_json(row["problem"])
        for way in row["ways"]:
            works = taken(p, way["took"])
            if works is not None and p.device == "cuda":  # it goes on while the device computes
                works = tuple(w for w in works if w.kind.endswith(HOST))
            works = None if works is None else tuple(w for w in works if w.kind != KEPT)
            if works:
                yield Call(works, ANY if p.device == "cuda" else p.dtype, way["us"])


def taken(p: Problem, took: Mapping[str, str]) -> tuple[Work, ...] | None:
    """The work of a call that took these backends for its pieces; None where nobody tells it."""
    if set(took.values()) & set(_COMPOSED[1:]):
        return None
    if took.get(STEP) == ways.EAGER and not p.needs_grad:
        return None  # PyTorch's ops as a user calls them are none of our backends
    found = []
    pieces = {q: name for q, name in took.items() if (q, name) != (STEP, "pieces")}
    if p.needs_grad and STEP not in pieces:
        found.append(host(f"{p.family} node"))
    for piece, name in pieces.items():
        made = family(p.family).work_of(p.with_piece(piece), name)
        if made is None:
            return None
        found += made
    return tuple(found)
