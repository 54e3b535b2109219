"""Running an experiment: its cases in order, each row written as soon as it is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

from fastlinear.bench import rows as rows_of
from fastlinear.bench.case import Case
from fastlinear.bench.cases import EXPERIMENTS
from fastlinear.bench.measure import Settings, first_line, run_case, skipped
from fastlinear.bench.rows import Row
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.progress import Progress, silent

_ROUNDS, _QUICK_ROUNDS = 15, 5
_BUDGET_S, _QUICK_BUDGET_S = 10.0, 1.0


def run(
    experiment: str,
    *,
    device: torch.device | str = "cpu",
    quick: bool = False,
    out: str | Path | None = None,
    dtypes: Sequence[str] | None = None,
    threads: int | None = None,
    only: str | None = None,
    skip: Sequence[str] = (),
    tune: bool = False,
    rounds: int | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Row]:
    """Run an experiment and return its rows, losses, skips and failures included.

    Args:
        experiment: a name in ``bench.cases.EXPERIMENTS``.
        device: where to run; its type picks the experiment's cases.
        quick: fewer and smaller cases, few rounds, no contender that takes minutes to prepare.
        out: JSONL file, replaced at the start and written case by case.
        dtypes: only cases of these dtypes.
        threads: torch's intra-op threads for the length of the run.
        only: only cases whose name contains this text.
        skip: contenders to leave out, by exact name.
        tune: first tune fastlinear for every case (writes the user's tuned cache).
        rounds: interleaved rounds; by default 15, 5 when quick.
        budget_s: start no further case after this many seconds; the others are recorded as skipped.
        seed: seed of every random draw.
        progress: told about every case.

    Returns:
        One dict a (case, contender, metric), with the keys ``results/README.md`` explains. A
        contender that cannot take part, fails or is wrong has ``valid`` false and no timing.

    Raises:
        InputError: an unknown experiment or dtype, or no case is left.
        UnsupportedError: the device is not there.
    """
    where = _device(device)
    picked = _cases(experiment, where.type, quick, dtypes, only, seed)
    settings = Settings(
        where,
        rounds or (_QUICK_ROUNDS if quick else _ROUNDS),
        _QUICK_BUDGET_S if quick else _BUDGET_S,
        frozenset(skip),
        tune,
        _command(experiment, where, quick, dtypes, threads, only, skip, tune, rounds, seed),
    )
    start = time.monotonic()
    rows: list[Row] = []
    with _threads(threads), _current(where), _opened(out) as file:
        for i, case in enumerate(picked):
            progress(case.name, i, len(picked))
            if budget_s is not None and time.monotonic() - start > budget_s:
                fresh = [skipped(case, "all", "the run's time budget was spent", settings.facts())]
            else:
                fresh = _run_case(case, settings)
            rows += fresh
            if file is not None:
                file.writelines(map(rows_of.to_line, fresh))
                file.flush()
        progress("done", len(picked), len(picked))
    return rows


def _run_case(case: Case, settings: Settings) -> list[Row]:
    """The case's rows; a case that breaks outside its contenders is one row with the reason."""
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
            expected="a CUDA device",
            received="torch.cuda.is_available() is False",
            remedy="Use device='cpu', or see `fastlinear doctor`.",
        )
    return where


def _cases(
    experiment: str,
    device: str,
    quick: bool,
    dtypes: Sequence[str] | None,
    only: str | None,
    seed: int,
) -> list[Case]:
    if experiment not in EXPERIMENTS:
        raise InputError(
            "bench.run", expected=f"an experiment in {sorted(EXPERIMENTS)}", received=experiment
        )
    unknown = sorted(set(dtypes or ()) - set(FLOAT_DTYPES))
    if unknown:
        raise InputError(
            "bench.run", expected=f"dtypes in {sorted(FLOAT_DTYPES)}", received=", ".join(unknown)
        )
    every = EXPERIMENTS[experiment](device, quick)
    picked = [
        replace(c, seed=seed)
        for c in every
        if (dtypes is None or c.dtype in dtypes) and (only is None or only in c.name)
    ]
    if not picked:
        raise InputError(
            "bench.run",
            expected="a filter that leaves at least one case",
            received=f"dtypes={dtypes}, only={only!r}",
            remedy="Names look like: " + "; ".join(c.name for c in every[:3]) + ".",
        )
    return picked


def _command(
    experiment: str,
    device: torch.device,
    quick: bool,
    dtypes: Sequence[str] | None,
    threads: int | None,
    only: str | None,
    skip: Sequence[str],
    tune: bool,
    rounds: int | None,
    seed: int,
) -> str:
    """The command that repeats this run."""
    words = ["python -m fastlinear.bench", experiment, f"--device {device}"]
    words += ["--quick"] if quick else []
    words += [f"--dtype {d}" for d in dtypes or ()]
    words += [f"--threads {threads}"] if threads else []
    words += [f"--only {only!r}"] if only else []
    words += [f"--skip {name}" for name in skip]
    words += ["--tune"] if tune else []
    words += [f"--rounds {rounds}"] if rounds else []
    words += [f"--seed {seed}"] if seed else []
    return " ".join(words)


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
def _opened(out: str | Path | None) -> Iterator[TextIO | None]:
    if out is None:
        yield None
        return
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise InputError(
            "bench.run", expected="a writable file for the rows", received=f"{path}: {error}"
        ) from error
    with file:
        yield file
