"""Running an experiment: its cases in order, each row written as soon as it is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import resume as resuming
from benchmarks.harness import rows as rows_of
from benchmarks.harness.case import Case
from benchmarks.harness.measure import first_line, run_case, skipped
from benchmarks.harness.pick import check_known, command, pick
from benchmarks.harness.precompile import Precompiler
from benchmarks.harness.rows import Row
from benchmarks.harness.settings import Settings
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.progress import Progress, silent

_ROUNDS, _QUICK_ROUNDS = 15, 5
_BUDGET_S, _QUICK_BUDGET_S = 10.0, 1.0
_CASES_A_FULL_COLLECTION = 32
_CASES_A_JOB = 16  # compiled ahead at a time: a run that is cut has compiled few in vain


def run(
    experiment: str,
    *,
    device: torch.device | str = "cpu",
    quick: bool = False,
    out: str | Path | None = None,
    dtypes: Sequence[str] | None = None,
    threads: int | None = None,
    only: str | None = None,
    where: Sequence[str] = (),
    peers: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    tune: bool = False,
    rounds: int | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    jobs: int = 1,
    resume: str | Path | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """Run an experiment and return its rows, losses, skips and failures included.

    Args:
        experiment: a name in ``experiments.EXPERIMENTS``.
        device: where to run; its type picks the experiment's cases.
        quick: fewer and smaller cases, few rounds, no contender that takes minutes to prepare.
        out: JSONL file, replaced at the start and written case by case.
        dtypes: only cases of these dtypes.
        threads: torch's intra-op threads for the length of the run.
        only: only cases whose name contains this text.
        where: only cases of these sizes or options, each ``"NAME=VALUE,VALUE"``, for example
            ``"M=8192"`` or ``"L=8,4"``.
        peers: only these contenders, by exact name; those that take minutes to prepare then take
            part in every case.
        skip: contenders to leave out, by exact name.
        tune: first tune fastlinear for every case (writes the user's tuned cache).
        rounds: interleaved rounds; by default 15, 5 when quick.
        budget_s: start no further case after this many seconds; the others are recorded as skipped.
        seed: seed of every random draw.
        jobs: if above 1, so many processes compile ahead what the contenders of the next cases
            compile, as far as it stays on disk; then those cases are measured.
        resume: JSONL file of an earlier run, which need not exist. Its rows of this experiment are
            kept where commit, device and versions are those of this run, and only cases without
            all their rows are measured. ``out`` is this file if not given.
        progress: told about every case.

    Returns:
        One dict a (case, contender, metric), with the keys ``results/README.md`` explains, those
        that were kept first. A contender that cannot take part, fails or is wrong has ``valid``
        false and no timing.

    Raises:
        InputError: an unknown experiment, dtype or contender (in ``peers`` or ``skip``), a name or
            value in ``where`` that no case has, no case or no contender is left, or the file to
            resume would lose rows of another run.
        UnsupportedError: the device is not there.
    """
    place = _device(device)
    picked = pick(experiment, place.type, quick, dtypes, only, where)
    picked = [replace(c, seed=seed) for c in picked]
    if peers:  # by name, also those that take long
        picked = [replace(c, light=False, without=()) for c in picked]
    check_known(picked, peers or (), skip)
    told: dict[str, Any] = {
        "quick": quick,
        "dtype": dtypes,
        "threads": threads,
        "only": only,
        "where": where,
        "peer": peers,
        "skip": skip,
        "tune": tune,
        "rounds": rounds,
        "seed": seed,
    }
    settings = Settings(
        place,
        rounds or (_QUICK_ROUNDS if quick else _ROUNDS),
        _QUICK_BUDGET_S if quick else _BUDGET_S,
        frozenset(skip),
        None if peers is None else frozenset(peers),
        tune,
        command(experiment, place, told),
    )
    start = time.monotonic()
    with (
        _threads(threads),
        _current(place),
        resuming.opened(resume, out, picked, settings) as (kept, file),
        Precompiler(settings, jobs) as precompiler,
        _few_to_collect() as keep_apart,
    ):
        rows = list(kept.rows)
        if kept.foreign:
            progress(f"{kept.foreign} rows of other runs are left out", 0, len(picked))
        left = [c for c in picked if resuming.key(c.to_json()) not in kept.finished]
        done = len(picked) - len(left)
        for i, case in enumerate(left):
            spent = budget_s is not None and time.monotonic() - start > budget_s
            if not spent and i % (_CASES_A_JOB * jobs) == 0:
                precompiler.compile(left[i : i + _CASES_A_JOB * jobs], progress)
            progress(case.name, done + i, len(picked))
            if spent:
                fresh = [skipped(case, "all", "the run's time budget was spent", settings.facts())]
            else:
                fresh = _run_case(case, settings)
            keep_apart()
            rows += fresh
            if file is not None:
                file.writelines(map(rows_of.to_line, fresh))
                file.flush()
        progress("done", len(picked), len(picked))
    return rows


def _run_case(case: Case, settings: Settings) -> list[Row]:
    """The case's rows; a case that is left out, or breaks outside its contenders, is one row with
    the reason."""
    if case.left_out:
        return [skipped(case, "all", case.left_out, settings.facts())]
    try:
        return run_case(case, settings)
    except Exception as error:  # noqa: BLE001 - hours of rows must not be lost to one case
        reason = f"failed: {type(error).__name__}: {first_line(error)}"
        return [skipped(case, "all", reason, settings.facts())]


# --------------------------------------------------------------------------------------------
# Arguments


def _device(device: torch.device | str) -> torch.device:
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "bench.run",
            "a CUDA device",
            "torch.cuda.is_available() is False",
            "Use device='cpu', or see `fastlinear doctor`.",
        )
    return where


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one, where graphs and streams are made."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _few_to_collect() -> Iterator[Callable[[], None]]:
    """What to call after each case: what survived it is not looked at by the next collections.

    Every case ends with a collection, and compilers and rows leave more objects than a case makes.
    """
    if gc.get_freeze_count():  # the caller has plans of its own
        yield lambda: None
        return
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls % _CASES_A_FULL_COLLECTION == 0:  # survivors may have died in cycles since
            gc.unfreeze()
            gc.collect()
        gc.freeze()

    try:
        yield call
    finally:
        gc.unfreeze()
