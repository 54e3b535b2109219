"""Compiled libraries on a hostile disk: nothing is loaded that is damaged or not ours."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import fastlinear as fl
from fastlinear.core import files
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.settings import cache_dir
from fastlinear.families.diagonal import reference
from fastlinear.native import compiler, cpp_build, library_store

pytestmark = [
    pytest.mark.own_builds,
    pytest.mark.skipif(cpp_build.reason_not() is not None, reason="no C++ compiler"),
]
ANSWER = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A C++ file of its own."""
    cpp_build.forget()
    path = tmp_path / "answer.cpp"
    path.write_text(ANSWER)
    yield path
    for build in cpp_build._builds.values():
        build.stop()
    cpp_build.forget()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The compiler's calls."""
    ran: list[list[str]] = []
    failure = compiler.Compiler.failure

    def counted(self: compiler.Compiler, command: list[str], scratch: Path) -> str | None:
        ran.append(command)
        return failure(self, command, scratch)

    monkeypatch.setattr(compiler.Compiler, "failure", counted)
    return ran


def kept(folder: Path | None = None) -> Path:
    (library,) = (cache_dir() / "cpp" if folder is None else folder).glob("*.so")
    return library


def rewritten(library: Path, content: bytes) -> None:
    """As another file: this process has the old one mapped."""
    library.unlink()
    library.write_bytes(content)
    library.chmod(0o700)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut short": lambda so: rewritten(so, so.read_bytes()[:4096]),
    "empty": lambda so: rewritten(so, b""),
    "one bit": lambda so: rewritten(so, so.read_bytes()[:-1] + b"\x01"),
    "foreign": lambda so: rewritten(so, b"#!/bin/sh\n"),
    "no digest": lambda so: Path(f"{so}.sha256").unlink(),
    "an empty digest": lambda so: Path(f"{so}.sha256").write_text(""),
    "a long digest": lambda so: Path(f"{so}.sha256").write_text("0" * 70),
    "a link": lambda so: so.rename(so.with_name("x")) and so.symlink_to(so.with_name("x")),
    "writable for the group": lambda so: so.chmod(0o770),
    "a pipe": lambda so: so.unlink() or os.mkfifo(so, 0o600),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_compiled_anew(source: Path, runs: list[list[str]], damage: str) -> None:
    cpp_build.load(source)
    library = kept()
    once = len(runs)
    cpp_build.forget()
    cpp_build.load(source)
    assert len(runs) == once, "a whole one is taken"
    DAMAGE[damage](library)
    assert library_store.loaded(library, ctypes.CDLL) is None
    cpp_build.forget()
    assert cpp_build.load(source).answer() == 42
    assert len(runs) == 2 * once
    assert library_store.loaded(library, ctypes.CDLL) is not None
    assert not library.is_symlink()
    assert not list(library.parent.glob("building-*"))


def test_a_later_process_repairs_a_library_cut_short(source: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fastlinear.native import cpp_build; "
        "sys.exit(cpp_build.load(Path(sys.argv[1])).answer())"
    )
    command = [sys.executable, "-c", code, str(source)]
    assert subprocess.run(command, check=False).returncode == 42
    os.truncate(kept(), kept().stat().st_size // 2)
    assert subprocess.run(command, check=False).returncode == 42


def test_what_was_looked_at_is_what_is_loaded(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user exchanges the folder between the look and the use."""
    cpp_build.load(source)
    good = kept()
    source.write_text('extern "C" int answer() { return 13; }\n')
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(source.parent / "theirs"))
    cpp_build.load(source)
    bad = kept()
    for path in (bad, Path(f"{bad}.sha256")):
        path.rename(path.parent / path.name.replace(bad.name, "late.so"))
    for path in (good, Path(f"{good}.sha256")):
        path.rename(path.parent / path.name.replace(good.name, "late.so"))
    is_whole = library_store._is_whole

    def then_exchanged(folder: int, name: str) -> bool:
        found = is_whole(folder, name)
        good.parent.rename(good.parent.with_name("moved"))
        bad.parent.rename(good.parent)
        return found

    monkeypatch.setattr(library_store, "_is_whole", then_exchanged)
    found = library_store.loaded(good.with_name("late.so"), ctypes.CDLL)
    assert found is not None
    assert found.answer() == 42


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_passed_over(source: Path, mode: int) -> None:
    folder = cache_dir() / "cpp"
    cpp_build.load(source)
    library = kept()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="chmod go-w"):
        library_store.loaded(library, ctypes.CDLL)
    cpp_build.forget()
    assert cpp_build.load(source).answer() == 42
    assert kept(source.parent / "tmp" / f"fastlinear-{os.getuid()}")


@pytest.mark.parametrize(("mode", "served"), [(0o770, False), (0o707, False), (0o1777, True)])
def test_so_is_one_whose_parent_they_may_write_to(tmp_path: Path, mode: int, served: bool) -> None:
    parent = tmp_path / "parent"
    (parent / "inner" / "cpp").mkdir(parents=True)
    parent.chmod(mode)
    link = tmp_path / "link"
    link.symlink_to(parent / "inner")  # is followed, and its target looked at
    if served:
        os.close(files.open_private(link / "cpp"))
    else:
        with pytest.raises(PermissionError, match="parent"):
            files.open_private(link / "cpp")


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "is_ours", lambda _: False)
    with pytest.raises(PermissionError, match="belongs to user"):
        files.open_private(tmp_path)


def test_folders_are_made_for_this_user_alone(source: Path) -> None:
    before = os.umask(0o002)
    try:
        cpp_build.load(source)
    finally:
        os.umask(before)
    for path in (cache_dir(), cache_dir() / "cpp", kept()):
        assert path.stat().st_mode & 0o777 == 0o700
    os.close(files.open_private(cache_dir() / "cpp"))


def locked(source: Path) -> FileLock:
    """The lock of the library, as another process that hangs would hold it."""
    library = cpp_build._prepared(source)[2][0]
    files.make_folder(library.parent)
    lock = FileLock(f"{library}.lock")
    lock.acquire()
    return lock


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_QUIET_S", "LOCK_PATIENCE_S", "PATIENCE_S"):
        monkeypatch.setattr(cpp_build, name, 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_held_lock_is_not_waited_for(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = locked(source)
    assert cpp_build.failed(source) is None
    assert cpp_build.why_not_loaded(source) == "another process still compiles answer.cpp"
    assert cpp_build.failed(source) == "another process still compiles answer.cpp"
    (record,) = caplog.records
    assert "another process compiles answer.cpp" in record.getMessage()
    lock.release()
    assert cpp_build.load(source).answer() == 42
    assert cpp_build.why_not_loaded(source) is None


def test_a_lock_that_is_never_released_is_passed_by(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_store, "LOCK_S", 0.2)
    lock = locked(source)
    assert cpp_build.load(source).answer() == 42
    lock.release()


@pytest.mark.usefixtures("impatient")
def test_calls_take_another_backend_until_the_library_is_there(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = source.parent / "started"
    script = source.parent / "cxx"
    script.write_text(f'#!/bin/sh\ntouch "{started}"\nsleep 60 & wait\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    x, w, b = torch.randn(300, 640), torch.randn(640), torch.randn(640)
    y = fl.diagonal_linear(x, w, b, "gelu_tanh")
    assert torch.allclose(y, reference.diagonal_linear(x, w, b, "gelu_tanh", None), atol=1e-5)
    assert started.exists(), "the default here is compiled"
    (build,) = cpp_build._builds.values()
    assert build.left
    assert not build.done.is_set()
    told: list[None] = []
    monkeypatch.setattr(cpp_build.cache, "changed", lambda: told.append(None))
    build.stop()
    assert told, "plans are made anew"


@pytest.mark.parametrize("age", ["old", "young", "in use"])
def test_what_killed_builds_left_is_swept(source: Path, age: str) -> None:
    folder = cache_dir() / "cpp"
    files.make_folder(folder)
    left = folder / "building-0"
    left.mkdir()
    (left / "answer.o").write_text("")
    lock = FileLock(left / ".lock")
    if age == "in use":
        lock.acquire()
    if age != "young":
        os.utime(left, (time.time() - 3600,) * 2)
    cpp_build.load(source)
    assert left.exists() == (age != "old")
    lock.release()


def test_a_compiler_behind_a_launcher(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``CXX`` is split as a shell splits it, and ``~`` is home."""
    home = source.parent / "a home"
    home.mkdir()
    (home / "launch").write_text(f'#!/bin/sh\ntouch "{home}/launched"\nexec "$@"\n')
    (home / "launch").chmod(0o755)
    (real,) = compiler.compiler() or ("",)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CXX", f'"~/launch" "{real}" -DANSWER=43')
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", "~/cache")
    source.write_text(ANSWER.replace("42", "ANSWER"))
    assert cpp_build.load(source).answer() == 43
    assert (home / "launched").exists()
    assert kept(home / "cache" / "cpp")
    for broken in ('g++ "', "no-such-compiler -O3", " "):
        monkeypatch.setenv("CXX", broken)
        assert "$CXX" in str(cpp_build.reason_not())


@pytest.mark.parametrize("who", ["the compiler", "the file system"])
def test_a_full_disk_is_called_so(source: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    if who == "the compiler":
        script = source.parent / "cxx"
        script.write_text("#!/bin/sh\necho x.s: No space left on device >&2; exit 1\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
    else:

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(files, "flush", full)
    with pytest.raises(UnsupportedError, match="No space left") as error:
        cpp_build.load(source)
    assert error.value.remedy.startswith("Free space there")
    assert not list((cache_dir() / "cpp").glob("building-*"))
    assert not list((cache_dir() / "cpp").glob("*.so"))
