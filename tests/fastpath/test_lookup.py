"""The compiled fast path is built beside the calls: it delays none, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.settings import cache_dir
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.spec import FRONT
from fastlinear.fastpath import autograd_node, library, lookup
from fastlinear.native import cpp_build
from fastlinear.op.front import no_table

pytestmark = [
    pytest.mark.own_builds,
    pytest.mark.skipif(library.missing() is not None, reason="no compiled fast path here"),
]


@pytest.fixture(autouse=True)
def _no_fast_path_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FRONT, "table", no_table)
    FRONT.plans.clear()


def compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The compiler becomes a shell script, which adds a line to the returned file when it runs."""
    runs, file = folder / "runs", folder / "compiler"
    file.write_text(f'#!/bin/sh\necho $$ >> "{runs}"\n{script}\n')
    file.chmod(0o755)
    monkeypatch.setenv("CXX", str(file))
    monkeypatch.setattr(cpp_build, "compiler", lambda: (str(file),))
    runs.touch()
    return runs


def given(m: int = 3) -> tuple[Tensor, list[Tensor], None]:
    return torch.randn(m, 8), [torch.randn(8, 8), torch.randn(4, 8)], None


def check(m: int = 3) -> None:
    """A call through PyTorch's ops, which compiles nothing of its own."""
    x, ws, bs = given(m)
    y = fl.mlp(x, ws, bs, backend="eager")
    assert torch.allclose(y, reference.mlp(x, ws, (None, None), "relu", "none"), atol=1e-5)


def test_a_slow_compiler_delays_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = compiler(tmp_path, "sleep 60 & wait", monkeypatch)
    began = time.perf_counter()
    for m in range(1, 5):
        check(m)
        check(m)
    assert time.perf_counter() - began < 5
    assert FRONT.table is no_table
    assert not lookup.wait(0.01)
    assert lookup.reason_not() is None
    build = lookup._build
    until = time.monotonic() + 20
    while not runs.read_text():
        assert time.monotonic() < until, build
        time.sleep(0.01)
    build.stop()
    assert build.done.is_set()
    assert build.compiler.process is not None
    assert build.compiler.process.poll() is not None
    assert not list((cache_dir() / "cpp").glob("building-*"))
    assert not lookup.wait(0)
    assert lookup.reason_not() == "the process ends"
    check()


def test_plans_seen_before_are_served_once_the_fast_path_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (real,) = cpp_build.compiler() or ("",)
    runs = compiler(tmp_path, f'sleep 1; exec "{real}" "$@"', monkeypatch)
    monkeypatch.setattr(autograd_node, "begun", lambda: False)  # no tapes: Python's plan serves
    x, ws, bs = given()
    before = fl.mlp(x, ws, bs, backend="eager")
    assert FRONT.table is no_table
    assert lookup.wait(), lookup.reason_not()
    table = lookup.table("mlp")
    assert table is not None
    call = (x, ws, bs, "relu", "none", "eager")
    for _ in range(2):  # plans are made anew, and are the table's when their calls come again
        assert table.call(*call) is None
        assert torch.equal(fl.mlp(x, ws, bs, backend="eager"), before)
    assert FRONT.table is table.call
    assert torch.equal(table.call(*call), before)
    monkeypatch.setattr(FRONT, "looked_up", None)
    assert torch.equal(fl.mlp(x, ws, bs, backend="eager"), before)
    # a later process finds it compiled: no thread, and the fast path at once
    monkeypatch.setattr(lookup, "_build", lookup._Build())
    assert lookup.table("mlp") is not None
    assert len(runs.read_text().splitlines()) == 1


def test_a_failing_compiler_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = compiler(tmp_path, "echo cannot be >&2; exit 1", monkeypatch)
    check()
    assert not lookup.wait(30)
    assert "cannot be" in str(lookup.reason_not())
    for m in range(4, 8):
        check(m)
    assert lookup.table("mlp") is None
    assert len(runs.read_text().splitlines()) == 1


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_build, "compiler", lambda: None)
    check()
    assert not lookup.wait(0)
    assert "no C++ compiler" in str(lookup.reason_not())


def test_a_damaged_library_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler(tmp_path, "exit 1", monkeypatch)
    (first, _) = library.places(library.command())
    first.parent.mkdir(parents=True)
    first.write_bytes(b"not a library")
    check()
    assert not lookup.wait(30)
    assert lookup.reason_not() == "exit status 1"
    assert len(runs.read_text().splitlines()) == 1


def test_folders_that_cannot_be_written_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler(tmp_path, "exit 1", monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(library, "places", lambda *_: [tmp_path / "file" / "lookup.so"])
    check()
    assert not lookup.wait(30)
    assert str(tmp_path / "file") in str(lookup.reason_not())
    assert not runs.read_text()


def test_many_threads_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = compiler(tmp_path, "sleep 0.3; exit 1", monkeypatch)
    threads = [threading.Thread(target=check, args=(m,)) for m in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lookup.wait(30)
    assert len(runs.read_text().splitlines()) == 1


_SCRIPT = """
import os, sys, time, warnings
import torch, fastlinear as fl
from fastlinear.fastpath import lookup
warnings.simplefilter("error")

def call():
    x, w = torch.ones(2, 3), [torch.ones(4, 3)]
    assert fl.mlp(x, w, backend="eager").sum() == 24

call()
while not os.path.getsize(RUNS): time.sleep(0.01)
if sys.argv[1] == "fork":
    warnings.simplefilter("ignore")  # forking where threads run
    child = os.fork()
    if child == 0:
        assert not lookup._build.started
        call()
        assert lookup._build.started and not lookup.wait(0.1)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert lookup.reason_not() is None and not lookup._build.done.is_set()
"""


def running(groups: list[str]) -> list[str]:
    """Processes of these groups that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if group in groups and state != "Z":
                found.append(stat.parent.name)
    return found


@pytest.mark.parametrize("how", ["exit", "fork"])
def test_no_compiler_outlives_the_process(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler(tmp_path, "sleep 120 & wait", monkeypatch)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.replace("RUNS", repr(str(runs))), how],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ,
    )
    assert (done.returncode, done.stderr) == (0, "")
    groups = runs.read_text().split()
    assert len(groups) == 1  # a forked child waits for its parent's
    assert running(groups) == []
    assert not list((cache_dir() / "cpp").glob("building-*"))
