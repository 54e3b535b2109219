"""Compiling C++ at run time: where the library goes, and what is said when it cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastlinear.core.errors import UnsupportedError
from fastlinear.core.settings import cache_dir
from fastlinear.native import compiler, cpp_build
from fastlinear.native.compiler import Compiler

pytestmark = [
    pytest.mark.own_builds,
    pytest.mark.skipif(cpp_build.reason_not() is not None, reason="no C++ compiler"),
]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A C++ file of its own."""
    cpp_build.forget()
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    yield path
    cpp_build.forget()


def kept(folder: Path) -> list[str]:
    return [p.name for p in folder.glob("*.so")] if folder.exists() else []


def test_compiles_once_and_keeps_the_library(source: Path) -> None:
    assert cpp_build.load(source).answer() == 42
    (name,) = kept(cache_dir() / "cpp")
    before = (cache_dir() / "cpp" / name).stat().st_mtime_ns
    cpp_build.forget()
    assert cpp_build.load(source).answer() == 42
    assert (cache_dir() / "cpp" / name).stat().st_mtime_ns == before


def test_a_changed_header_is_compiled_anew(source: Path) -> None:
    """Headers of headers count, each once; those of the compiler do not."""
    inner, outer = source.with_name("inner.h"), source.with_name("outer.h")
    inner.write_text("#pragma once\n#define ANSWER 42\n")
    outer.write_text('#include <cstdint>\n#pragma once\n#include "inner.h"\n')
    source.write_text(
        '#include "outer.h"\n  #  include "inner.h"\nextern "C" int answer() { return ANSWER; }\n'
    )
    assert cpp_build.sources(source) == (source, outer, inner)
    assert cpp_build.load(source).answer() == 42
    inner.write_text("#pragma once\n#define ANSWER 43\n")
    cpp_build.forget()
    assert cpp_build.load(source).answer() == 43
    assert len(kept(cache_dir() / "cpp")) == 2


def test_a_missing_header_is_named(source: Path) -> None:
    source.write_text('#include "nowhere.h"\n')
    with pytest.raises(UnsupportedError, match=r"nowhere\.h"):
        cpp_build.load(source)


@pytest.mark.parametrize("obstacle", ["a file in the way", "a folder anybody may write"])
def test_another_folder_when_the_cache_cannot_serve(source: Path, obstacle: str) -> None:
    folder = cache_dir() / "cpp"
    folder.parent.mkdir(parents=True)
    if obstacle == "a file in the way":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert cpp_build.load(source).answer() == 42
    assert not kept(folder) if folder.is_dir() else True
    assert kept(source.parent / "tmp" / f"fastlinear-{os.getuid()}")


def test_says_where_it_tried(source: Path) -> None:
    (source.parent / "tmp" / f"fastlinear-{os.getuid()}").write_text("")
    cache_dir().mkdir(parents=True)
    (cache_dir() / "cpp").write_text("")
    with pytest.raises(UnsupportedError, match="FASTLINEAR_CACHE_DIR") as error:
        cpp_build.load(source)
    assert str(cache_dir()) in str(error.value)


def test_a_compiler_that_rejects_or_cannot_run(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text("this is no C++\n")
    with pytest.raises(UnsupportedError, match=r"answer\.cpp to compile"):
        cpp_build.load(source)
    cpp_build.forget()
    broken = source.parent / "cxx"
    broken.write_text("no program\n")
    broken.chmod(0o755)
    monkeypatch.setattr(cpp_build, "compiler", lambda: (str(broken),))
    with pytest.raises(UnsupportedError, match=r"\$CXX"):
        cpp_build.load(source)
    assert kept(cache_dir() / "cpp") == []


def test_a_failure_is_remembered_with_its_words(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    failure = Compiler.failure

    def counted(self: Compiler, command: list[str], scratch: Path) -> str | None:
        ran.append(command)
        return failure(self, command, scratch)

    monkeypatch.setattr(Compiler, "failure", counted)
    source.write_text("this is no C++\n")
    assert cpp_build.failed(source) is None, "asking does not compile"
    errors = []
    for _ in range(3):
        with pytest.raises(UnsupportedError, match=r"answer\.cpp") as error:
            cpp_build.load(source)
        errors.append(error.value)
    assert len(ran) == 1
    assert len({str(e) for e in errors}) == 1
    assert len({id(e) for e in errors}) == 3, "one exception raised twice keeps old tracebacks"
    assert cpp_build.failed(source) == errors[0].received
    assert cpp_build.why_not_loaded(source) == str(errors[0])
    assert len(ran) == 1
    source.write_text('extern "C" int answer() { return 43; }\n')
    cpp_build.forget()
    assert cpp_build.failed(source) is None
    assert cpp_build.why_not_loaded(source) is None
    assert cpp_build.load(source).answer() == 43


def test_a_remedy_is_tried_at_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error tells to set FASTLINEAR_CACHE_DIR; doing so needs no new process."""
    (source.parent / "tmp" / f"fastlinear-{os.getuid()}").write_text("")
    cache_dir().mkdir(parents=True)
    (cache_dir() / "cpp").write_text("")
    with pytest.raises(UnsupportedError, match="FASTLINEAR_CACHE_DIR"):
        cpp_build.load(source)
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(source.parent / "elsewhere"))
    assert cpp_build.load(source).answer() == 42


def test_many_threads_compile_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []
    compile_ = cpp_build._compile

    def counted(*given: Any) -> None:
        compiled.append(source)
        compile_(*given)

    monkeypatch.setattr(cpp_build, "_compile", counted)
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(cpp_build.load, [source] * 4))
    assert len(compiled) == 1
    assert all(library is libraries[0] for library in libraries)


def test_many_processes_compile_one_file(source: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fastlinear.native import cpp_build; "
        "sys.exit(cpp_build.load(Path(sys.argv[1])).answer())"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(source)]) for _ in range(3)]
    assert [p.wait(timeout=120) for p in running] == [42, 42, 42]
    assert len(kept(cache_dir() / "cpp")) == 1


def test_a_compiler_gets_the_longer_the_more_others_compute(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that does not end is told apart from one that fails."""
    monkeypatch.setattr(compiler.os, "cpu_count", lambda: 2)

    def limit(load: float) -> float:
        monkeypatch.setattr(compiler.os, "getloadavg", lambda: (load, 0.0, 0.0))
        return compiler.limit_s()

    assert limit(0.1) == limit(2.0) >= 300.0
    assert limit(6.0) == 3 * limit(2.0)
    assert limit(1e6) == 1800.0
    monkeypatch.setattr(compiler, "_COMPILE_S", 0.0)
    said = Compiler(polite=False).failure(["sleep", "60"], source.parent)
    assert said == "sleep had not ended after 0 s"
