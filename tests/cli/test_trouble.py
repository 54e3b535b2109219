"""What goes wrong around a command: interrupts, places that cannot be written, a broken cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import fastlinear.dispatch.tune
import fastlinear.rewrite
from fastlinear.cli.app import terminable
from fastlinear.cli.console import check_writable
from fastlinear.dispatch import cache

Run = Callable[..., Result]

BAD_INPUT, UNSUPPORTED, INTERRUPTED, TERMINATED = 2, 5, 130, 143
CALL = ("--m", "8", "--k", "16", "--n", "16", "--activation", "relu")
SPEED = ("--rounds", "5", "--budget", "0.05")


def test_an_interrupted_tune_keeps_and_shows_what_it_has(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = fastlinear.dispatch.tune.tune, []

    def interrupted(problem: object, **options: object) -> object:
        if seen:
            raise KeyboardInterrupt
        seen.append(problem)
        return real(problem, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fastlinear.dispatch.tune, "tune", interrupted)
    result = run("tune", *CALL, *SPEED, "--train", "--json")
    assert result.exit_code == INTERRUPTED
    (tuned,) = json.loads(result.stdout)
    assert tuned["stored"] is True
    assert "interrupted; what was tuned so far is remembered" in result.stderr
    assert "Traceback" not in result.stderr
    cache.forget()
    kept = json.loads(run("cache", "show", "--json").stdout)["entries"]
    assert [entry["best"] for entry in kept.values()] == [tuned["best"]]


@pytest.mark.parametrize(
    "arguments",
    [
        ("optimize", "userpackage:mlp", "--plan"),
        ("optimize", "userpackage:mlp", "--html"),
        ("profile", "userpackage:mlp", "--html"),
        ("bench", "linear", "--out"),
        ("bench", "linear", "--plot"),
        ("bench", "linear", "--html"),
    ],
)
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file/x", "file is no folder"),
        ("folder", "a folder"),
        ("/proc/1/report", "No such file or directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_said_before_the_work(
    run: Run,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    place: str,
    why: str,
) -> None:
    import benchmarks.harness.run

    def worked(*_: object, **__: object) -> None:
        raise AssertionError("the work was begun")

    monkeypatch.setattr(fastlinear.rewrite, "optimize_", worked)
    monkeypatch.setattr(fastlinear.rewrite, "profile", worked)
    monkeypatch.setattr(benchmarks.harness.run, "run", worked)
    (folder / "file").write_text("")
    (folder / "folder").mkdir()
    result = run(*arguments, place)
    assert result.exit_code == BAD_INPUT, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {arguments[-1]}: expected a file that can be written")
    assert why in result.stderr
    assert "Choose another place." in result.stderr


def test_a_plot_of_another_format_is_said_before_the_work(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import benchmarks.harness.run

    monkeypatch.setattr(benchmarks.harness.run, "run", lambda *_, **__: pytest.fail("begun"))
    result = run("bench", "linear", "--plot", "rows.jpeg")
    assert result.exit_code == BAD_INPUT
    assert "--plot: expected a file ending in .png or .svg; received rows.jpeg" in result.stderr


def test_a_broken_cache_is_one_line_and_no_error(run: Run) -> None:
    path = Path(run("cache", "path").stdout.strip())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"format": 1, "entr')
    cache.forget()
    result = run("explain", *CALL)
    assert result.exit_code == 0
    assert "linear_act.forward" in result.stdout
    assert result.stderr.startswith("warning: the tuned cache")
    assert result.stderr.count("\n") == 1
    assert ".py" not in result.stderr
    assert run("tune", *CALL, *SPEED, "--quiet").exit_code == 0
    cache.forget()
    assert "relu" in run("cache", "show").stdout


def test_entries_without_their_problem_are_a_broken_cache(run: Run) -> None:
    run("tune", *CALL, *SPEED, "--quiet")
    path = Path(run("cache", "path").stdout.strip())
    data = json.loads(path.read_text())
    for entry in data["entries"].values():
        del entry["problem"]
    path.write_text(json.dumps(data))
    cache.forget()
    result = run("cache", "show")
    assert result.exit_code == 0
    assert "nothing tuned yet" in result.stdout
    assert "corrupt or foreign" in result.stderr


def test_a_cache_that_cannot_be_removed(run: Run) -> None:
    path = Path(run("cache", "path").stdout.strip())
    path.mkdir(parents=True)  # a folder where the file should be
    result = run("cache", "clear")
    assert result.exit_code == UNSUPPORTED
    assert "cache.clear: expected a tuned cache that can be removed" in result.stderr
    path.rmdir()
    assert run("cache", "clear").exit_code == 0


def test_checking_a_place_leaves_it_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "place"
    folder.mkdir()
    there, link = folder / "there", folder / "link"
    there.write_text("kept")
    link.symlink_to(folder / "nowhere")
    for path in (there, link, folder / "new" / "file"):
        check_writable("--plan", path, through_another=True)
    assert there.read_text() == "kept"
    assert link.is_symlink()
    assert sorted(p.name for p in folder.rglob("*")) == ["link", "new", "there"]


def test_termination_is_told_like_an_interrupt(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("went on")

    monkeypatch.setattr(fastlinear.rewrite, "optimize_", terminated)
    result = run("optimize", "userpackage:mlp", "--plan", "plan.json", "--json")
    assert result.exit_code == TERMINATED
    assert result.stdout == ""
    assert "error: terminated; what was tuned so far is remembered" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(folder.glob("*plan*"))
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_forked_process_ends_by_the_signal_itself() -> None:
    with terminable():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """``fastlinear doctor | head``: the pipe closes under what is printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fastlinear", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"FASTLINEAR_CACHE_DIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        said = errors.read().decode()
    process.wait(60)
    assert "SystemExit" not in said
    assert "Traceback" not in said
