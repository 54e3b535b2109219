"""``make sanitize``: what it would run, and that the calls it makes have arguments that fit."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlinear.core.errors import UnsupportedError
from fastlinear.dispatch.backend import families, family
from fastlinear.families.declared import load_all
from fastlinear.fastpath import library as fastpath_library
from fastlinear.native import cpp_build, library_store
from tests.families import sanitize_calls, sanitize_cpu
from tests.families import sanitize_families as sanitize


def test_every_family_is_checked() -> None:
    load_all()
    assert set(sanitize.FAMILIES) == set(families())
    assert set(sanitize_calls.FAMILIES) == set(sanitize.FAMILIES) - set(sanitize.OWN)


@pytest.mark.parametrize("tool", sanitize.TOOLS)
@pytest.mark.parametrize("name", sanitize.FAMILIES)
def test_a_command_names_the_tool_and_a_script_that_is_there(name: str, tool: str) -> None:
    words = sanitize.command("/bin/sanitizer", name, tool)
    assert words[:3] == ["/bin/sanitizer", "--tool", tool]
    assert words[3:6] == ["--error-exitcode", str(sanitize.REPORTED), sys.executable]
    assert words[6] == "-m"
    assert find_spec(words[7]) is not None
    known = {("mlp", "racecheck"): ["ordered"], ("mlp", "memcheck"): [], ("linear_act", tool): []}
    assert words[8:] == known.get((name, tool), [name])


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
    real = sanitize_calls.fl.ragged_linear

    def off(*args: Any, **kwargs: Any) -> Any:
        y = real(*args, **kwargs)
        return y * 1.5 if kwargs["backend"] == "cpp" else y

    monkeypatch.setattr(sanitize_calls.fl, "ragged_linear", off)
    assert sanitize_calls.main(["ragged_linear"], "cpu") == 1
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


_HAZARD = """========= Error: Race reported between Write access at {kernel}+0x10af0
=========     and Read access at {kernel}+0x18760 [24576 hazards]
"""


@pytest.mark.parametrize(
    ("family", "tool", "code", "kernel", "good"),
    [
        ("mlp", "racecheck", 0, None, True),
        ("mlp", "racecheck", sanitize.REPORTED, "whole_mlp", True),
        ("mlp", "racecheck", sanitize.REPORTED, "whole_mlp_grid", False),
        ("mlp", "memcheck", sanitize.REPORTED, "whole_mlp", False),
        ("linear_act", "racecheck", sanitize.REPORTED, "linear_act_gemm", True),
        ("linear_act", "racecheck", sanitize.REPORTED, None, False),
        ("gated_mlp", "racecheck", sanitize.REPORTED, "linear_act_gemm", False),
        ("gated_mlp", "racecheck", 1, None, False),
    ],
)
def test_reports_fail_but_for_hazards_that_are_known(
    family: str,
    tool: str,
    code: int,
    kernel: str | None,
    good: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A program that prints and exits as compute-sanitizer would, really run."""
    told = _HAZARD.format(kernel=kernel) if kernel else ""
    program = tmp_path / "compute-sanitizer"
    asked = tmp_path / "asked"
    program.write_text(f"#!/bin/sh\necho $@ > {asked}\ncat <<'E'\n{told}E\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: str(program))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sanitize.main(["--tool", tool, family]) == (0 if good else 1)
    out = capsys.readouterr().out
    assert told in out
    assert out.splitlines()[-1].startswith(f"{'ok   ' if good else 'ERROR'} {family}, {tool}: ")
    assert ("ORDERING.md" in out) == (good and code != 0)
    assert asked.read_text().endswith("ordered\n") == (family == "mlp" and tool == "racecheck")


def test_what_is_known_is_written_down() -> None:
    for (name, _), kernels in sanitize.KNOWN.items():
        folder = sanitize.ROOT / "src/fastlinear/families" / sanitize.OWN[name]
        assert (folder / "ORDERING.md").is_file()
        sources = "".join(path.read_text() for path in folder.glob("cuda/*.cu"))
        assert all(f"\n{kernel}(" in sources for kernel in kernels)


# --------------------------------------------------------------------------------------------
# C++ on a CPU

_FAULTY = """
#include <cstdlib>
extern "C" int beyond(int i) {
  char* volatile p = static_cast<char*>(std::malloc(8));
  return p[i];
}
"""
_CALL = """
import os, sys
from pathlib import Path
os.environ.pop("LD_PRELOAD", None)
from fastlinear.native import cpp_build
library = cpp_build.load(Path(sys.argv[1]))
print(library._name, library.beyond(7), flush=True)
library.beyond(9)
"""


@pytest.mark.own_builds
@pytest.mark.skipif(cpp_build.reason_not() is not None, reason="no C++ compiler")
def test_the_builder_sanitizes_and_keeps_both_kinds_of_libraries(tmp_path: Path) -> None:
    library = sanitize_cpu.runtime()
    if library is None:
        pytest.skip("the compiler has no address sanitizer")
    source, script = tmp_path / "faulty.cpp", tmp_path / "call.py"
    source.write_text(_FAULTY)
    script.write_text(_CALL)
    env = {**os.environ, **sanitize_cpu._SETTINGS, "LD_PRELOAD": sanitize_cpu.preloaded(library)}
    words = [sys.executable, str(script), str(source)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    sanitized = Path(done.stdout.split()[0]).name
    plain = Path(cpp_build.load(source)._name).name
    assert plain != sanitized
    kept = library_store.folders()[0].glob("faulty-*.so")
    assert {path.name for path in kept} == {plain, sanitized}


def test_the_fast_path_and_all_kernels_are_sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    command = fastpath_library.command(fastpath_library.NODE)
    before = fastpath_library.places(command, fastpath_library.NODE)
    monkeypatch.setenv("FASTLINEAR_SANITIZE", "address,undefined")
    sanitized = fastpath_library.command(fastpath_library.NODE)
    assert set(sanitized) - set(command) == set(cpp_build.sanitizers())
    assert fastpath_library.places(sanitized, fastpath_library.NODE) != before
    names = {path.name for path in sanitize_cpu.kernels()}
    assert {"elementwise.cpp", "grouped.cpp", "mlp.cpp", "unequal.cpp"} <= names
    assert not names & {"lookup.cpp", "autograd_node.cpp"}
