"""``make sanitize``: what it would run, and that the calls it makes have arguments that fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sanitize_calls
import sanitize_families as sanitize
import torch

from fastlinear.core.errors import UnsupportedError
from fastlinear.dispatch.backend import families, family


def test_every_family_is_checked() -> None:
    functions = {"ragged_linear", "unequal_linear"}
    assert set(sanitize.FAMILIES) == set(families()) | functions
    assert set(sanitize_calls.FAMILIES) == set(sanitize.FAMILIES) - set(sanitize.OWN)


@pytest.mark.parametrize("tool", sanitize.TOOLS)
@pytest.mark.parametrize("name", sanitize.FAMILIES)
def test_a_command_names_the_tool_and_a_script_that_is_there(name: str, tool: str) -> None:
    words = sanitize.command("/bin/sanitizer", name, tool)
    assert words[:3] == ["/bin/sanitizer", "--tool", tool]
    assert words[3:6] == ["--error-exitcode", str(sanitize.REPORTED), sys.executable]
    assert Path(words[6]).is_file()
    known = {("mlp", "racecheck"): ["ordered"], ("mlp", "memcheck"): [], ("linear_act", tool): []}
    assert words[7:] == known.get((name, tool), [name])


@pytest.mark.parametrize("name", sanitize_calls.REGISTERED)
def test_problems_of_every_piece_and_backend_of_a_gpu(name: str) -> None:
    fam = family(name)
    posed = list(sanitize_calls.problems(name, "cpu"))
    assert {p.piece for p in posed} == set(fam.pieces) - {"step"}
    assert {p.dtype for p in posed} == set(sanitize_calls.DTYPES)
    for p in posed:
        assert p.device == "cpu"
        inputs = fam.make_inputs(p, torch.device("cpu"), 0)
        assert fam.reference(p, inputs) is not None
        assert p.dim("M") <= 130  # a sanitizer takes a hundred times as long
    on_gpu = list(sanitize_calls.problems(name, "cuda"))
    assert len(on_gpu) == len(posed)
    assert {p.device for p in on_gpu} == {"cuda"}


@pytest.mark.parametrize("name", sanitize_calls.FAMILIES)
def test_the_calls_are_right_on_a_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize_calls.main([name], "cpu") == 0
    told = capsys.readouterr().out
    assert "ok   " in told
    assert "WRONG" not in told


def test_wrong_results_count(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sanitize_calls.fl.unequal_linear

    def off(*args: Any, **kwargs: Any) -> Any:
        ys = real(*args, **kwargs)
        return [y * 1.5 for y in ys] if kwargs["backend"] == "together" else ys

    monkeypatch.setattr(sanitize_calls.fl, "unequal_linear", off)
    assert sanitize_calls.main(["unequal_linear"], "cpu") == 2  # one a dtype
    with pytest.raises(SystemExit, match="no family 'mlp' here"):
        sanitize_calls.main(["mlp"], "cpu")


@pytest.mark.parametrize(("program", "cuda"), [(None, True), ("/bin/true", False)])
def test_it_says_what_is_missing(
    program: str | None, cuda: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sanitize, "sanitizer", lambda: program)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert sanitize.main([]) == UnsupportedError.exit_code
    assert "expected compute-sanitizer and a CUDA device" in capsys.readouterr().err


def test_the_sanitizer_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.sanitizer() == str(program)


def test_reports_fail_but_for_hazards_that_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {"mlp": sanitize.REPORTED, "linear_act": 0, "gated_mlp": 1}
    asked: list[list[str]] = []

    def instead(words: list[str], **_: Any) -> Any:
        asked.append(words)
        own = Path(words[6]).parent.name
        return SimpleNamespace(returncode=codes[own if own in codes else words[7]])

    monkeypatch.setattr(sanitize, "sanitizer", lambda: "/bin/sanitizer")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", instead)
    assert sanitize.main(["--tool", "racecheck", "mlp", "linear_act"]) == 0
    assert asked[0][-1] == "ordered"
    assert "ORDERING.md" in capsys.readouterr().out
    assert sanitize.main(["--tool", "memcheck", "mlp"]) == 1
    assert "errors reported" in capsys.readouterr().out
    assert sanitize.main(["--tool", "memcheck", "gated_mlp"]) == 1
    assert "a wrong result" in capsys.readouterr().out
    assert len(asked) == 4
