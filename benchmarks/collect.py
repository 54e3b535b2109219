"""Rows for a GPU's shipped prices, by many processes: ``python -m benchmarks collect``.

Kernels are compiled side by side, and timed one at a time on each of the machine's like GPUs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel import measured
from fastlinear.calibration import drawn, measure, ways
from fastlinear.core.device import device_facts
from fastlinear.core.environment import environment
from fastlinear.core.errors import UnsupportedError
from fastlinear.dispatch import prices
from fastlinear.dispatch.backend import family

_WAYS_S = 0.3  # of the time, for whole calls, in one process when the others are done
Row = dict[str, Any]


def collect(
    families: Sequence[str],
    seed: int,
    seconds: float,
    jobs: int,
    out: Path,
    backends: Sequence[str] = (),
    pieces: Sequence[str] = (),
) -> tuple[int, int]:
    """Write a header, rows of pieces and rows of whole calls; returns how many of each.

    Args:
        seed: draws the calls.
        seconds: about how long to measure.
        jobs: processes.
        backends: only calls that one of these can serve; all if not given.
        pieces: only these, and no whole calls; all if not given.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "benchmarks collect",
            "a CUDA device",
            "none that torch sees",
            "`fastlinear calibrate --rows FILE` measures a CPU.",
        )
    place, whole_s = torch.device("cuda"), 0.0 if pieces else seconds * _WAYS_S
    end = time.time() + seconds - whole_s
    header = {
        "device": device_facts(place).slug,
        "traits": prices.traits(device_facts(place)),
        "env": environment(place),
    }
    tasks = partial(_drawn, families, seed, tuple(backends))
    pieces_of = partial(_pieces, tuple(pieces))
    parts, written = 0, 0
    with out.open("w") as file:
        file.write(json.dumps(header) + "\n")
        for case, rows, why in measured(pieces_of, tasks, device="cuda", jobs=jobs, end=end):
            if why:
                print(f"{case.problem.describe()}: {why}", file=sys.stderr)
            for row in rows or ():
                file.write(json.dumps(row) + "\n")
                parts += 1
            file.flush()  # a run that is cut leaves what it has
        for row in _whole(tasks(), time.time() + whole_s):
            file.write(json.dumps(row) + "\n")
            file.flush()
            written += 1
    return parts, written


def _drawn(families: Sequence[str], seed: int, backends: Sequence[str]) -> Iterator[drawn.Drawn]:
    for index in count():
        for name in families:
            for mode in (drawn.INFERENCE, drawn.TRAINING):
                case = drawn.case(name, seed, index, "cuda", mode)
                if not backends or _served(case, backends):
                    yield case


def _served(case: drawn.Drawn, backends: Sequence[str]) -> bool:
    return any(
        backend.name in backends and backend.why_not_ready(p) is None
        for p in measure.pieces_of(case.problem)
        for backend in family(p.family).candidates(p.piece)
    )


def _pieces(pieces: tuple[str, ...], case: drawn.Drawn, place: torch.device) -> list[Row]:
    return list(measure.measure_pieces(case, place, pieces))


def _whole(cases: Iterable[drawn.Drawn], end: float) -> Iterator[Row]:
    ways.wait()
    for case in cases:
        if time.time() > end:
            return
        try:
            yield measure.measure_ways(case, torch.device("cuda"))
        except Exception as error:  # noqa: BLE001 - the other cases go on
            print(f"{case.problem.describe()}: {error}", file=sys.stderr)
