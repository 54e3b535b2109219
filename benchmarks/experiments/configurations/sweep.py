"""Configurations of kernels, timed and fitted: ``python -m benchmarks.experiments.configurations``.

``sweep`` times drawn configurations on drawn problems, by many processes as ``collect`` does;
``fit`` prints the microseconds of the terms that explain them, and how far the choice by them is
from the best that was timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.experiments.configurations import (
    diagonal,
    few_rows,
    linear_backward,
    linear_products,
    mlp_rows,
    mlp_tasks,
    mlp_whole,
    planes,
    rows,
)
from benchmarks.experiments.configurations.kind import Kind, Problem
from benchmarks.harness.rows import opened
from benchmarks.parallel import measured
from fastlinear.calibration import measure
from fastlinear.fastpath import lookup

KINDS: dict[str, Kind] = {
    "few-rows": few_rows.KIND,
    "linear-backward": linear_backward.KIND,
    "linear-products": linear_products.KIND,
    "diagonal": diagonal.BACKWARD,
    "diagonal-forward": diagonal.FORWARD,
    "mlp-rows": mlp_rows.KIND,
    "mlp-tasks": mlp_tasks.KIND,
    "mlp-whole": mlp_whole.KIND,
    "planes": planes.KIND,
}
_FROM_BEST, _OF_BEST, _FROM_ALL = 5, 0.1, 4  # of the tenth that should be best, and of all
_LEAST_BEST = 12
Row = dict[str, Any]


def problems(name: str, seed: int) -> Iterator[Problem]:
    """Problems of a kind without end."""
    for index in count():
        drawn = KINDS[name].draw(Random(f"{seed} {index}"))
        if drawn is not None:
            yield drawn


def tried(kind: Kind, problem: Problem) -> list[Any]:
    """What a call takes, some configurations that should be best, and some of all."""
    draw = Random(rows.told(problem))
    every = sorted(kind.candidates(problem), key=lambda c: kind.microseconds(problem, c))
    best = every[: max(_LEAST_BEST, round(_OF_BEST * len(every)))]
    some = [draw.sample(of, min(n, len(of))) for of, n in ((best, _FROM_BEST), (every, _FROM_ALL))]
    return list(dict.fromkeys((kind.chosen(problem), *some[0], *some[1])))


def sweep(name: str, end: float, problem: Problem, place: torch.device) -> list[Row]:
    """A row for each configuration that is tried before the ``end``, of ``time.time()``."""
    kind = KINDS[name]
    lookup.wait(lookup.PATIENCE_S)  # kernels that begin early are launched by the fast path
    with measure.exclusive():
        sets = kind.inputs(problem, place)
    found: list[Row] = []
    for index, config in enumerate(tried(kind, problem)):
        if time.time() > end:
            break
        row = {**problem, "config": asdict(config), "us": None, "sets": len(sets)}
        try:
            with torch.no_grad():
                row["us"] = measure.device_us(kind.run(problem, config), sets, place)
            row |= _used(kind)
        except Exception as error:  # noqa: BLE001 - one that needs too much is a result
            row["why"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            _check(place)
        found.append(row | ({"chosen": True} if index == 0 else {}))
    return found


def _used(kind: Kind) -> Row:
    """What the newest kernel takes of a multiprocessor, where Triton compiled it."""
    plan = list(kind.plans.values())[-1] if kind.plans else None
    launch = getattr(plan, "_launch", None) or getattr(plan, "launch", plan)
    compiled = getattr(launch, "_compiled", None)
    if compiled is None:
        return {}
    shared = compiled.metadata.shared
    return {"registers": compiled.n_regs, "spills": compiled.n_spills, "shared": shared}


def _check(place: torch.device) -> None:
    """End the process where the device's context is lost: all that follows would fail."""
    try:
        torch.cuda.synchronize(place)
    except RuntimeError as error:
        sys.exit(str(error))


def main() -> None:
    """Sweep on a GPU, or fit what sweeps wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("sweep", "fit"))
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument(
        "files", type=Path, nargs="+", help="rows, JSON lines; sweep writes the one"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=8)
    given = parser.parse_args()
    if given.task == "fit":
        kind = KINDS[given.kind]
        for group, timed in rows.read(kind, *given.files).items():
            print(f"{group}: {rows.report(kind, timed)}")
        return
    lookup.wait(lookup.PATIENCE_S)  # builds it once, for all processes
    end = time.time() + given.seconds
    how: Any = {"device": "cuda", "jobs": given.jobs, "end": end}
    work, tasks = partial(sweep, given.kind, end), partial(problems, given.kind, given.seed)
    with opened(given.files[0], "w") as file:
        for problem, found, why in measured(work, tasks, **how):
            if why:
                print(f"{rows.told(problem)}: {why}", file=sys.stderr)
            file.writelines(json.dumps(row) + "\n" for row in found or ())
            file.flush()
