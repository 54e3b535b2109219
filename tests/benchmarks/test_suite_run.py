"""Running the suite: crashes become rows, a run goes on where it was cut, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.suite import child, measure
from benchmarks.suite import run as running
from benchmarks.suite.family import Family
from benchmarks.suite.measure import How, Row
from benchmarks.suite.registry import picked
from benchmarks.suite.work import ASKED
from fastlinear.cli.app import app
from fastlinear.core.errors import InputError
from tests.benchmarks.suite_families import CPU, QUICK, RAISING, SMALL, small


def test_choosing_by_name_and_kind() -> None:
    assert [f.name for f in picked(["siren"])] == ["siren"]
    assert {f.kind for f in picked(kinds=["fields"])} == {"fields"}
    with pytest.raises(InputError, match="--kind in"):
        picked(kinds=["nonsense"])
    with pytest.raises(InputError, match="filters that leave at least one"):
        picked(["siren"], ["language"])


def test_a_family_whose_package_is_missing_is_skipped_by_name() -> None:
    absent = Family("absent", "tests", small, "a_package_that_nobody_has")
    row = running.in_child(absent, QUICK, 60.0, 1)
    assert (row["status"], row["ratio_to_best"]) == ("skipped", None)
    assert "a_package_that_nobody_has is not installed" in row["error"]["message"]


def test_an_error_becomes_a_row_that_says_where() -> None:
    row = child.row_of(RAISING, QUICK)
    assert row["status"] == "failed"
    assert row["error"]["stage"] == "build"
    assert row["error"]["message"] == "ValueError: no such widths"


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("import sys; print('the last words'); sys.exit(7)", "crashed", "exit code 7"),
        ("import time; time.sleep(60)", "timed out", "ended after 0.5 s"),
    ],
)
def test_a_process_that_ends_becomes_a_row(
    code: str, status: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = running.subprocess.Popen

    def instead(command: list[str], **how: Any) -> Any:
        return real([command[0], "-c", code], **how)

    monkeypatch.setattr(running.subprocess, "Popen", instead)
    row = running.in_child(SMALL, QUICK, 0.5 if "sleep" in code else 60.0, 1)
    assert row["status"] == status
    assert says in row["error"]["message"]
    assert row["seconds"]["total"] < 30.0  # ended, not waited for
    if "last words" in code:
        assert row["error"]["traceback"] == ["the last words"]


def test_a_run_goes_on_after_a_crash_and_where_it_was_cut(tmp_path: Path) -> None:
    out, asked = tmp_path / "rows.jsonl", []
    families = [Family(name, "tests", small) for name in "abcd"]
    tasks = [(family, QUICK) for family in families]

    def one(family: Family, how: How, *_: Any) -> Row:
        asked.append(family.name)
        if len(asked) == 4:
            raise KeyboardInterrupt
        status = {"b": "crashed"}.get(family.name, "measured")
        return measure.dated(measure.blank(family, how) | {"status": status}, CPU)

    with pytest.raises(KeyboardInterrupt):
        running.run(tasks, out=out, measured=one)
    with out.open("a") as file:
        file.write('{"experiment": "sui')  # a line that was cut
    rows = running.run(tasks, out=out, measured=one)
    assert asked == ["a", "b", "c", "d", "b", "d"]  # what has failed is tried again
    assert [row["family"] for row in rows] == ["a", "c", "b", "d"]
    kept = [json.loads(line)["family"] for line in out.read_text().splitlines()]
    assert kept == ["a", "c", "b", "d"]
    other = How(**{**QUICK.__dict__, "mode": "train"})
    assert len(running.run([*tasks, (families[0], other)], out=out, measured=one)) == 5


def test_rows_of_another_machine_are_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    row = measure.dated(measure.blank(SMALL, QUICK), CPU)
    row["env"] |= {"torch": "1.0"}
    out.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match="1 other rows"):
        running.run([(SMALL, QUICK)], out=out)
    assert json.loads(out.read_text()) == row


def test_rows_of_the_threads_asked_for_are_gone_on_with(tmp_path: Path) -> None:
    out, threads = tmp_path / "rows.jsonl", torch.get_num_threads() + 1
    row = measure.dated(measure.blank(SMALL, QUICK), CPU)
    row["env"] |= {"threads": threads}
    out.write_text(json.dumps(row) + "\n")
    assert running.run([(SMALL, QUICK)], out=out, threads=threads) == [row]
    with pytest.raises(InputError, match="1 other rows"):
        running.run([(SMALL, QUICK)], out=out)


def test_no_family_begins_after_the_budget() -> None:
    rows = running.run([(SMALL, QUICK)] * 2, budget_s=0.0, measured=lambda *_: pytest.fail("begun"))
    assert rows == []
    assert running.left([(SMALL, QUICK)], rows) == ["small, inference"]


@pytest.mark.slow
def test_the_command_measures_a_family_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["bench", "models", "--suite", "--only", "ppo", "--mode", "inference", "--quiet"]
    command += ["--skip", "compile", "--skip", ASKED, "--seconds", "0.5", "--rounds", "5"]
    done = CliRunner().invoke(app, [*command, "--threads", "1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    assert (row["family"], row["status"], row["verified"]) == ("ppo", "measured", True)
    assert row["command"].startswith("fastlinear bench models --device cpu --suite --only ppo")
    assert row["env"]["threads"] == 1
    assert row["seconds"]["total"] > 0.0


def test_the_command_names_families_and_refuses_unknown_peers() -> None:
    listed = CliRunner().invoke(app, ["bench", "models", "--suite", "--list", "--kind", "experts"])
    assert listed.exit_code == 0
    assert "mixtral" in listed.output
    assert "siren" not in listed.output
    wrong = CliRunner().invoke(app, ["bench", "models", "--suite", "--skip", "eager"])
    assert isinstance(wrong.exception, InputError | SystemExit)
    assert wrong.exit_code != 0
