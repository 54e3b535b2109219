"""Compiling ahead: which tasks there are, the processes that do them, one timing at a time."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from benchmarks.experiments import overhead
from benchmarks.harness import precompile
from benchmarks.harness.case import Case
from benchmarks.harness.kinds import KINDS
from benchmarks.harness.peer import Peer
from benchmarks.harness.precompile import Precompiler, Task, tasks_of
from benchmarks.harness.precompile_worker import time_alone
from benchmarks.harness.settings import Settings
from fastlinear.core.errors import InputError
from fastlinear.core.progress import silent

SETTINGS = Settings(torch.device("cpu"), rounds=5, budget_s=0.2)


def tiny(layers: int = 2, batch: int = 4, activation: str = "relu") -> Case:
    (first, *_) = overhead.cases("cpu", quick=True)
    options = (("activation", activation), *first.options[1:])
    return dataclasses.replace(
        first,
        dims=(("M", batch), ("L", layers), ("H", 16)),
        options=options,
        light=False,
        without=(),
    )


def test_a_case_survives_json() -> None:
    case = dataclasses.replace(tiny(), without=("compile",))
    assert Case.from_json(case.to_json()) == case


def test_tasks_share_the_timing_of_products_and_take_no_one_who_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(work: Any) -> Any:
        raise AssertionError

    known = (
        Peer("eager", never),
        Peer("compile", never, precompile=True),
        Peer("graphs", never, precompile=True),
        Peer("nowhere", never, lambda _: "not here", precompile=True),
        Peer("tuned", never, precompile=True, tunes=True),
    )
    kind = dataclasses.replace(KINDS["mlp"], peers=lambda _: known)
    monkeypatch.setitem(KINDS, "mlp", kind)  # type: ignore[call-overload]
    cases = [tiny(layers, batch) for batch in (2, 4) for layers in (1, 2)]
    cases[3] = dataclasses.replace(cases[3], without=("compile",))
    found = tasks_of(cases, dataclasses.replace(SETTINGS, skip=frozenset(["graphs"])))
    assert found == [
        Task((cases[0], cases[1]), ("tuned",)),
        Task((cases[2], cases[3]), ("tuned",)),
        *(Task((c,), ("compile",)) for c in cases[:3]),
    ]
    first_call = [dataclasses.replace(c, metrics=("first_call",)) for c in cases]
    assert tasks_of(first_call, SETTINGS) == []


def test_two_processes_answer_and_say_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = Task((tiny(),), ("eager",)), Task((tiny(activation="no_such"),), ("eager",))
    monkeypatch.setattr(precompile, "tasks_of", lambda *_: [good, bad, good])
    seen: list[tuple[str, int, int]] = []
    with Precompiler(SETTINGS, 2) as precompiler:
        precompiler.compile([tiny()], lambda *a: seen.append(a))
        processes = [w._process for w in precompiler._workers]
        assert all(p is not None and p.poll() is None for p in processes)
        folder = Path(precompiler._folder)
        assert folder.is_dir()
    assert all(p is not None and p.poll() is not None for p in processes)
    assert not folder.exists()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("not compiled ahead: no_such M4 L2 H16 float32 forward")
    assert "InputError" in line
    assert seen[:4] == [("compiling ahead", i, 3) for i in range(4)]
    assert seen[4][0].startswith("compiled ahead in")


def test_a_process_that_ends_costs_its_task_and_is_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precompile, "tasks_of", lambda *_: [Task((tiny(),), ("eager",))])
    monkeypatch.setattr(precompile, "_WORKER", "json.tool")  # finds no such file, and ends
    with Precompiler(SETTINGS, 2) as precompiler:
        for _ in range(5):  # a batch of one task is served by the first process
            precompiler.compile([tiny()], silent)
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("not compiled")]
    assert ["ended with exit code" in x for x in lines] == [True, True, True, False, False]
    assert all("ended 3 times" in x for x in lines[3:])


def test_one_job_starts_nothing_and_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "tasks_of", lambda *_: pytest.fail("begun"))
    with Precompiler(SETTINGS, 1) as precompiler:
        precompiler.compile([tiny()], silent)
    with pytest.raises(InputError, match="at least 1"):
        Precompiler(SETTINGS, 0)


@pytest.mark.parametrize("hooked", [True, False])
def test_inductor_times_under_the_lock(
    hooked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import codecache
    from torch._inductor.runtime import benchmarking

    lock = FileLock(tmp_path / "lock", thread_local=False)

    class Timer:
        def benchmark_gpu(self, call: Any) -> bool:
            return bool(call())

    def looked_up(self: object) -> bool:
        with lock:  # as the timings inside do
            pass
        return lock.is_locked

    contexts: list[Any] = []
    name = "set_gpu_benchmark_lock_context"
    if hooked:
        monkeypatch.setattr(benchmarking, name, contexts.append, raising=False)
    else:
        monkeypatch.delattr(benchmarking, name, raising=False)
    monkeypatch.setattr(benchmarking, "benchmarker", Timer())
    monkeypatch.setattr(codecache.PersistentCache, "lookup", looked_up)
    time_alone(lock)
    if hooked:
        (context,) = contexts
        with context(), context():
            assert lock.is_locked
    else:
        assert benchmarking.benchmarker.benchmark_gpu(lambda: lock.is_locked)
    assert codecache.PersistentCache.lookup(object())  # type: ignore[arg-type]
    assert not lock.is_locked


_RUN = """
import dataclasses
from torch._dynamo.utils import counters
from benchmarks.harness import measure
from benchmarks.harness.run import run
from benchmarks.experiments import overhead
from benchmarks.experiments import EXPERIMENTS
from fastlinear.core.cost import Ceilings

def noted(device):
    found = counters["inductor"]
    print("counts", found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
    released(device)  # forgets the counts as well

if __name__ == "__main__":
    dims = (("M", 4), ("L", 2), ("H", 16))
    case = dataclasses.replace(overhead.cases("cpu", quick=True)[0], dims=dims)
    EXPERIMENTS["overhead"] = lambda device, quick: [case]
    measure.ceilings_for = lambda *_: Ceilings(1e15, 1e15)
    released, measure.release = measure.release, noted
    run("overhead", peers=["eager", "compile"], rounds=5, jobs=2)
"""


@pytest.mark.slow
def test_what_was_compiled_ahead_is_found(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    # a process of its own: Inductor's keys hold flags that other tests may have set
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _RUN], env=environment, capture_output=True, text=True, check=True
    )
    assert "counts 1 0" in done.stdout, (done.stdout, done.stderr)
