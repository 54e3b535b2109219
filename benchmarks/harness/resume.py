"""Continuing a run that was cut: which rows of its file still hold, and which cases are left."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.harness import rows as rows_of
from benchmarks.harness.case import Case
from benchmarks.harness.kinds import KINDS
from benchmarks.harness.peer import TOO_SLOW
from benchmarks.harness.rows import Row
from benchmarks.harness.settings import LEFT_OUT, Settings
from fastlinear.core.errors import InputError

SAME = (
    *("commit", "fastlinear", "python", "torch", "triton", "cuda", "cudnn", "driver"),
    *("device", "threads", "flags", "variables"),
)
"""Keys of a row's ``env`` that must be those of this process for the row to be kept."""
_PARTS = ("light", "without", "left_out")  # of a case: who takes part, not what is computed


@dataclass(frozen=True)
class Kept:
    """What a file holds of a run.

    Attributes:
        rows: those to keep, in the file's order.
        finished: the cases that need not be measured, by ``key``.
        foreign: how many rows belong to another experiment, commit, device or version.
    """

    rows: list[Row] = field(default_factory=list)
    finished: frozenset[str] = frozenset()
    foreign: int = 0


def key(case: Mapping[str, Any]) -> str:
    """What a case computes, from its JSON; who takes part is not in it."""
    return json.dumps({k: v for k, v in case.items() if k not in _PARTS}, sort_keys=True)


def read(path: Path, cases: Sequence[Case], settings: Settings) -> Kept:
    """The rows of ``path`` that this run can keep; none where there is no such file.

    Rows of cases that are not among ``cases`` are kept as well. A case among them is finished when
    every contender that is to take part has all its rows; of an unfinished case no row is kept.

    Raises:
        InputError: a line other than a cut last one is no row.
    """
    if not path.exists():
        return Kept()
    experiment, here = cases[0].experiment, settings.environment()
    known: dict[str, list[Row]] = {}
    foreign = 0
    for row in rows_of.read_rows(path, cut=True):
        if row["experiment"] == experiment and all(row["env"].get(k) == here.get(k) for k in SAME):
            known.setdefault(key(row["case"]), []).append(row)
        else:
            foreign += 1
    finished = set()
    for case in cases:
        name = key(case.to_json())
        if name in known and _finished(case, known[name], settings):
            finished.add(name)
        else:
            known.pop(name, None)
    return Kept([row for rows in known.values() for row in rows], frozenset(finished), foreign)


def _finished(case: Case, rows: Sequence[Row], settings: Settings) -> bool:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["contender"], []).append(row)
    for peer in KINDS[case.family].peers(case):
        own = found.get(peer.name, [])
        if not own:
            return False
        if settings.why_not(peer, case) is not None:
            continue
        if any(row["skipped"] in (LEFT_OUT, TOO_SLOW) for row in own):
            return False  # it took no part then, and is to take part now
        if not own[0]["skipped"] and own[0]["valid"]:
            metrics = {m for m in case.metrics if m in peer.metrics}
            if metrics - {row["metric"] for row in own}:
                return False
    return True


@contextmanager
def opened(
    resume: str | Path | None, out: str | Path | None, cases: Sequence[Case], settings: Settings
) -> Iterator[tuple[Kept, TextIO | None]]:
    """What ``resume`` holds, and the file for the rows, which holds it as well.

    Args:
        resume: the file of an earlier run, which need not exist, or None.
        out: the file to write; None for ``resume`` itself.
        cases: the cases of this run.
        settings: those of this run.

    Raises:
        InputError: the file cannot be written, or writing it would lose rows of another run.
    """
    kept = Kept() if resume is None else read(Path(resume), cases, settings)
    out = resume if out is None else out
    if out is None:
        yield kept, None
        return
    path = Path(out)
    if kept.foreign and resume is not None and path.resolve() == Path(resume).resolve():
        raise InputError(
            "bench.run",
            "rows of one experiment, commit, device and set of versions to resume",
            f"{kept.foreign} others in {resume}, which would be lost",
            "Write to another file: --out.",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume is not None:  # at once: a kill leaves the old file or the new one
            partial = path.with_name("partial-" + path.name)
            rows_of.write_rows(kept.rows, partial)
            os.replace(partial, path)
        file = rows_of.opened(path, "w" if resume is None else "a")
    except OSError as error:
        raise InputError(
            "bench.run",
            "a writable file for the rows",
            f"{path}: {error}",
            "Choose another place for the rows.",
        ) from error
    with file:
        yield kept, file
