"""Running the suite: each family in a process of its own, each row written at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.harness import rows as rows_of
from benchmarks.harness.resume import SAME
from benchmarks.suite.child import task_of
from benchmarks.suite.family import Family
from benchmarks.suite.measure import FACTS, MEASURED, How, Row, blank, dated
from fastlinear.core.environment import environment
from fastlinear.core.errors import InputError
from fastlinear.core.progress import Progress, silent

CRASHED, TIMED_OUT, SKIPPED = "crashed", "timed out", "skipped"
_ROOT = Path(__file__).resolve().parents[2]
_LAST_LINES = 6
Task = tuple[Family, How]


def left(tasks: Sequence[Task], rows: Sequence[Row]) -> list[str]:
    """Names of the tasks without a row."""
    known = {key(row) for row in rows}
    return [f"{f.name}, {how.mode}" for f, how in tasks if key(blank(f, how)) not in known]


def key(row: Row) -> tuple[Any, ...]:
    """What a row measures."""
    return tuple(row[name] for name in FACTS)


def run(
    tasks: Sequence[Task],
    *,
    out: Path | None = None,
    budget_s: float | None = None,
    limit_s: float = 300.0,
    threads: int | None = None,
    progress: Progress = silent,
    measured: Callable[[Family, How, float, int | None], Row] | None = None,
) -> list[Row]:
    """The rows of these tasks, those that ``out`` holds already first.

    Args:
        tasks: families, each with how it is measured.
        out: JSONL file that every row is added to at once. Tasks whose rows it holds from the same
            commit, device and versions are not measured again; others are tried again.
        budget_s: start no further family after this many seconds.
        limit_s: seconds after which a family's process is ended.
        threads: torch's threads in that process.
        progress: told about every family.
        measured: measures one; ``in_child`` if not given.

    Raises:
        InputError: the file holds other rows, or cannot be written.
    """
    begin, measured = time.monotonic(), measured or in_child
    with _opened(out, tasks, threads) as (rows, file):
        known = {key(row) for row in rows}
        for done, (family, how) in enumerate(tasks):
            progress(f"{family.name}, {how.mode}", done, len(tasks))
            if key(blank(family, how)) in known:
                continue
            if budget_s is not None and time.monotonic() - begin > budget_s:
                break
            row = measured(family, how, limit_s, threads)
            rows.append(row)
            if file is not None:
                file.write(rows_of.to_line(row))
                file.flush()
        progress("done", len(tasks), len(tasks))
    return rows


def in_child(family: Family, how: How, limit_s: float, threads: int | None) -> Row:
    """The family's row, from a fresh process; a crash, or one that is ended, is a row as well."""
    begin = time.monotonic()
    if (why := family.why_not()) is not None:
        return _without(family, how, SKIPPED, why, begin)
    with tempfile.TemporaryDirectory() as folder:
        task, found, log = (Path(folder) / name for name in ("task.json", "row.json", "log.txt"))
        task.write_text(task_of(family, how, threads))
        command = [sys.executable, "-m", "benchmarks.suite.child", str(task), str(found)]
        with log.open("w") as said:
            process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env=_environment(),
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        spent = {"total": round(time.monotonic() - begin, 2)}
        if found.exists():
            row: Row = json.loads(found.read_text())
            return row | {"seconds": row["seconds"] | spent}
        last = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
    if code is None:
        return _without(family, how, TIMED_OUT, f"ended after {limit_s:g} s", begin, last)
    why = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return _without(family, how, CRASHED, why, begin, last)


def _without(
    family: Family, how: How, status: str, why: str, begin: float, last: Sequence[str] = ()
) -> Row:
    error = {"stage": "process", "message": why, "traceback": list(last)}
    spent = {"total": round(time.monotonic() - begin, 2)}
    row = blank(family, how) | {"status": status, "error": error, "seconds": spent}
    return dated(row, torch.device(how.device))


def _environment() -> dict[str, str]:
    """Of the child: the folders that this process imports from, and no downloads."""
    folders = os.pathsep.join(dict.fromkeys((str(_ROOT), *filter(None, sys.path))))
    return {**os.environ, "PYTHONPATH": folders, "HF_HUB_OFFLINE": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and the compilers that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _opened(
    path: Path | None, tasks: Sequence[Task], threads: int | None
) -> Iterator[tuple[list[Row], TextIO | None]]:
    """The rows that a file holds of an earlier run, and the file to add to."""
    if path is None:
        yield [], None
        return
    rows: list[Row] = []
    if path.exists() and tasks:
        rows = rows_of.read_rows(path, cut=True)
        here = environment(torch.device(tasks[0][1].device))
        here |= {} if threads is None else {"threads": threads}
        foreign = [row for row in rows if not _ours(row, here)]
        if foreign:
            raise InputError(
                "bench models --suite",
                "--out without a file, or with rows of the suite from this commit and machine",
                f"{len(foreign)} other rows in {path}",
                "Write to another file.",
            )
        rows = [row for row in rows if row["status"] == MEASURED]
        rows_of.write_rows(rows, partial := path.with_name("partial-" + path.name))
        os.replace(partial, path)
    with rows_of.opened(path, "a") as file:
        yield rows, file


def _ours(row: Row, here: dict[str, Any]) -> bool:
    of = row["env"]
    return row["experiment"] == "suite" and all(of.get(k) == here.get(k) for k in SAME)
