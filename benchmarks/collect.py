"""Rows for a GPU's shipped prices, by many processes: ``python -m benchmarks collect``.

Kernels are compiled side by side, and timed one at a time on each of the machine's like GPUs.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fastlinear.calibration import drawn, measure, ways
from fastlinear.core.device import device_facts
from fastlinear.core.environment import environment
from fastlinear.core.errors import UnsupportedError
from fastlinear.dispatch import prices

_LIMIT = drawn.Limit(3e11, 1 << 30)
_SHARE = 1.4  # of the memory, of all processes together: few need theirs at once
_GRACE_S = 10.0
_WAYS_S = 0.3  # of the time, for whole calls, in one process when the others are done
Row = dict[str, Any]


def collect(
    families: Sequence[str], seed: int, seconds: float, jobs: int, out: Path
) -> tuple[int, int]:
    """Write a header, rows of pieces and rows of whole calls; returns how many of each.

    Args:
        seed: draws the calls.
        seconds: about how long to measure.
        jobs: processes.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "benchmarks collect",
            "a CUDA device",
            "none that torch sees",
            "`fastlinear calibrate --rows FILE` measures a CPU.",
        )
    place, end = torch.device("cuda"), time.time() + seconds * (1 - _WAYS_S)
    jobs = max(jobs, torch.cuda.device_count())
    header = {
        "device": device_facts(place).slug,
        "traits": prices.traits(device_facts(place)),
        "env": environment(place),
    }
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        how = (jobs, folder, end, families, seed)
        running = [context.Process(target=_pieces, args=(i, *how)) for i in range(jobs)]
        for process in running:
            process.start()
        for process in running:
            process.join(max(0.0, end + _GRACE_S - time.time()))
            process.terminate()  # one that compiles still
        pieces = [
            json.loads(line)
            for file in sorted(Path(folder).glob("*.jsonl"))
            for line in file.read_text().split("\n")[:-1]  # the last may have been cut
        ]
    written = 0
    with out.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in (header, *pieces))
        file.flush()  # a run that is cut leaves what it has
        for row in _whole(families, seed, time.time() + seconds * _WAYS_S):
            file.write(json.dumps(row) + "\n")
            file.flush()
            written += 1
    return len(pieces), written


def _pieces(
    process: int, jobs: int, folder: str, end: float, families: Sequence[str], seed: int
) -> None:
    warnings.simplefilter("ignore")
    devices = torch.cuda.device_count()
    place = torch.device("cuda", process % devices)
    torch.cuda.set_device(place)
    torch.cuda.set_per_process_memory_fraction(min(1.0, _SHARE * devices / jobs))
    measure.exclusive = lambda: FileLock(f"{folder}/lock{place.index}")
    with Path(f"{folder}/{process}.jsonl").open("w") as file:
        for index in count(process, jobs):
            for name in families:
                for mode in (drawn.INFERENCE, drawn.TRAINING):
                    if time.time() > end:
                        return
                    case = drawn.case(name, seed, index, "cuda", mode, limit=_LIMIT)
                    try:
                        for row in measure.measure_pieces(case, place):
                            file.write(json.dumps(row) + "\n")
                    except Exception as error:  # noqa: BLE001 - the other cases go on
                        print(f"{case.problem.describe()}: {error}", file=sys.stderr)
                    file.flush()
                    torch.cuda.empty_cache()


def _whole(families: Sequence[str], seed: int, end: float) -> Iterator[Row]:
    ways.wait()
    for index in count():
        for name in families:
            for mode in (drawn.INFERENCE, drawn.TRAINING):
                if time.time() > end:
                    return
                case = drawn.case(name, seed, index, "cuda", mode, limit=_LIMIT)
                try:
                    yield measure.measure_ways(case, torch.device("cuda"))
                except Exception as error:  # noqa: BLE001 - the other cases go on
                    print(f"{case.problem.describe()}: {error}", file=sys.stderr)
