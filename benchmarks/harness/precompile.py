"""Compiling ahead: processes that fill the compilers' caches on disk before anything is timed.

They serve one batch of cases at a time and wait, on a pipe and without work, while its cases are
measured. A process that ends is started again for the next task.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from benchmarks.harness.case import Case
from benchmarks.harness.kinds import KINDS
from benchmarks.harness.settings import Settings
from fastlinear.core.errors import InputError
from fastlinear.core.progress import Progress

_WORKER = "benchmarks.harness.precompile_worker"
_MOST_ENDS = 3
_PATIENCE_S = 300.0  # without any answer; max-autotune takes up to a minute a chain


@dataclass(frozen=True)
class Task:
    """What one process does in one go: call these contenders once in each of these cases."""

    cases: tuple[Case, ...]
    peers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {"cases": [c.to_json() for c in self.cases], "peers": list(self.peers)}


def tasks_of(cases: Sequence[Case], settings: Settings) -> list[Task]:
    """The work of a batch, what takes longest first.

    A contender that times kernels for its products meets the same products in chains of any number
    of layers: such cases are one task, and the products are timed once. Cases that publish a first
    call, compilation included, are left alone.
    """
    tuned: dict[tuple[object, ...], list[Case]] = {}
    others = []
    for case in cases:
        if "first_call" in case.metrics:
            continue
        every = KINDS[case.family].peers(case)
        able = [p for p in every if p.precompile and settings.why_not(p, case) is None]
        sizes = tuple(d for d in case.dims if d[0] != "L")
        for peer in able:
            if peer.tunes:
                same = peer.name, case.family, sizes, case.dtype, case.direction, case.options
                tuned.setdefault(same, []).append(case)
        names = tuple(p.name for p in able if not p.tunes)
        if names:
            others.append(Task((case,), names))
    return [*(Task(tuple(same), (str(k[0]),)) for k, same in tuned.items()), *others]


class Precompiler:
    """The processes of a run: started at the first task, ended with the run.

    Args:
        settings: those of the run.
        jobs: how many processes; 1 for none.
    """

    def __init__(self, settings: Settings, jobs: int) -> None:
        if jobs < 1:
            raise InputError(
                "bench.run",
                "jobs of at least 1",
                str(jobs),
                "1 compiles nothing ahead.",
            )
        self._settings = settings
        self._jobs = jobs
        self._workers: list[_Worker] = []
        self._folder = ""

    def __enter__(self) -> Precompiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def compile(self, cases: Sequence[Case], progress: Progress) -> None:
        """Compile what these cases need; each failure is a line on stderr, and raises nothing.

        The measurement compiles again what failed here, and publishes how it fails.
        """
        if self._jobs == 1:
            return
        waiting = deque(tasks_of(cases, self._settings))
        total, start = len(waiting), time.monotonic()
        if not total:
            return
        if not self._workers:
            self._folder = self._folder or tempfile.mkdtemp(prefix="fastlinear-ahead-")
            told = {
                "device": str(self._settings.device),
                "threads": torch.get_num_threads(),
                "precision": torch.get_float32_matmul_precision(),
                "lock": str(Path(self._folder) / "timing.lock"),
            }
            self._workers = [_Worker(json.dumps(told)) for _ in range(self._jobs)]
        answers: queue.Queue[list[str]] = queue.Queue()
        for worker in self._workers[:total]:
            threading.Thread(target=worker.serve, args=(waiting, answers), daemon=True).start()
        for done in range(total):
            progress("compiling ahead", done, total)
            try:
                failures = answers.get(timeout=_PATIENCE_S)
            except queue.Empty:
                self._end()
                _say(f"{total - done} tasks, no answer in {_PATIENCE_S:.0f} s")
                return
            for failure in failures:
                _say(failure)
        progress("compiling ahead", total, total)
        progress(f"compiled ahead in {time.monotonic() - start:.0f} s", total, total)

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []


def _say(failure: str) -> None:
    print(f"not compiled ahead: {failure}", file=sys.stderr, flush=True)


class _Worker:
    """One process, and the thread that hands it tasks while a batch is compiled."""

    def __init__(self, told: str) -> None:
        self._told = told
        self._process: subprocess.Popen[str] | None = None
        self._ends = 0
        self._over = False

    def serve(self, waiting: deque[Task], answers: queue.Queue[list[str]]) -> None:
        """Take tasks until none is left; one list of failures each."""
        while not self._over:
            try:
                task = waiting.popleft()
            except IndexError:
                return
            answers.put(self._ask(task))

    def end(self) -> None:
        """End the process, whatever it does."""
        self._over = True
        if self._process is not None:
            self._process.kill()
            _close(self._process)

    def _ask(self, task: Task) -> list[str]:
        name = f"{task.cases[0].name}, {', '.join(task.peers)}"
        if self._ends == _MOST_ENDS:
            return [f"{name}: its process ended {_MOST_ENDS} times"]
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        try:
            process.stdin.write(json.dumps(task.to_json()) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass  # it has ended: said below
        if answer:
            failures: list[str] = json.loads(answer)
            return failures
        self._process = None
        self._ends += 1
        return [f"{name}: its process ended with exit code {_close(process)}"]

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER, self._told],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # an interrupt is the run's, which ends its processes
                env=os.environ
                # it finds what this process finds, and in this order
                | {"PYTHONPATH": os.pathsep.join(sys.path)}
                # one process is one job: Inductor's own pool would start as many for each
                | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
            )
        return self._process


def _close(process: subprocess.Popen[str]) -> int:
    """Wait for a process that ends; its exit code."""
    code = process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # what it did not read any more
            stream.close()
    return code
