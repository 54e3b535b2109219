"""Running an experiment: its cases in order, each row written as soon as it is measured."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

from fastlinear.bench import rows as rows_of
from fastlinear.bench.case import Case
from fastlinear.bench.cases import EXPERIMENTS
from fastlinear.bench.kinds import KINDS
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
    where: Sequence[str] = (),
    peers: Sequence[str] | None = None,
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
        where: only cases of these sizes or options, each ``"NAME=VALUE,VALUE"``, for example
            ``"M=8192"`` or ``"L=8,4"``.
        peers: only these contenders, by exact name; those that take minutes to prepare then take
            part in every case.
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
        InputError: an unknown experiment, dtype or contender, or no case is left.
        UnsupportedError: the device is not there.
    """
    place = _device(device)
    picked = _cases(experiment, place.type, quick, dtypes, only, where)
    picked = [replace(c, seed=seed, light=c.light and not peers) for c in picked]
    _known(picked, peers or ())
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
        _command(experiment, place, told),
    )
    start = time.monotonic()
    rows: list[Row] = []
    with _threads(threads), _current(place), _opened(out) as file:
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
    where: Sequence[str],
) -> list[Case]:
    if experiment not in EXPERIMENTS:
        raise InputError(
            "bench.run",
            expected=f"an experiment in {sorted(EXPERIMENTS)}",
            received=experiment,
            remedy="docs/benchmarks.md says what each measures.",
        )
    unknown = sorted(set(dtypes or ()) - set(FLOAT_DTYPES))
    if unknown:
        raise InputError(
            "bench.run",
            expected=f"dtypes in {sorted(FLOAT_DTYPES)}",
            received=", ".join(unknown),
            remedy="Leave it out for all dtypes of the experiment.",
        )
    every = EXPERIMENTS[experiment](device, quick)
    wanted = [_wanted(text) for text in where]
    picked = [
        c
        for c in every
        if (dtypes is None or c.dtype in dtypes)
        and (only is None or only in c.name)
        and all(_facts(c).get(name) in values for name, values in wanted)
    ]
    if not picked:
        raise InputError(
            "bench.run",
            expected="a filter that leaves at least one case",
            received=f"dtypes={dtypes}, only={only!r}, where={list(where)}",
            remedy="Names look like: " + "; ".join(c.name for c in every[:3]) + ".",
        )
    return picked


def _wanted(text: str) -> tuple[str, frozenset[str]]:
    """``"L=8,4"`` → ``("L", {"8", "4"})``."""
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise InputError(
            "bench.run",
            expected="where as NAME=VALUE,VALUE",
            received=text,
            remedy="For example M=8192 or L=8,4.",
        )
    return name, frozenset(values.split(","))


def _facts(case: Case) -> dict[str, str]:
    """Sizes, options and direction of a case, as text."""
    sizes = {name: str(size) for name, size in case.dims}
    return {**sizes, **dict(case.options), "direction": case.direction}


def _known(picked: Sequence[Case], peers: Sequence[str]) -> None:
    """Raise unless each name is a contender of some case."""
    names = {p.name for c in picked for p in KINDS[c.family].peers(c)} if peers else set()
    unknown = sorted(set(peers) - names)
    if unknown:
        raise InputError(
            "bench.run",
            expected=f"peers in {sorted(names)}",
            received=", ".join(unknown),
            remedy="A contender is named as its rows name it.",
        )


def _command(experiment: str, device: torch.device, told: Mapping[str, Any]) -> str:
    """The command that repeats this run; options left at their default are not named."""
    words = ["python -m fastlinear.bench", experiment, f"--device {device}"]
    for name, value in told.items():
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{name} {shlex.quote(str(v))}" for v in value]
        elif value:
            words.append(f"--{name} {shlex.quote(str(value))}")
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
            "bench.run",
            expected="a writable file for the rows",
            received=f"{path}: {error}",
            remedy="Choose another place for the rows.",
        ) from error
    with file:
        yield file
