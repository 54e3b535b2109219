"""The compiled door's libraries: where they lie, and their compiler, which can be stopped."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from fastlinear.core.errors import UnsupportedError
from fastlinear.core.settings import cache_dir
from fastlinear.ops.common import cpp_build

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_COMPILE_TIMEOUT_S = 180
_STOPPED = "the process ends"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-DAT_PER_OPERATOR_HEADERS")


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        source: the file that is compiled.
        headers: our own files that it includes.
        header: a file of torch's that it needs, below torch's folder of headers.
    """

    source: Path
    headers: tuple[Path, ...]
    header: str


DOOR = Library(
    _HERE / "door.cpp",
    (_HERE / "door_call.h", _HERE / "door_plans.h"),
    "ATen/EmptyTensor.h",
)
NODE = Library(
    _HERE / "door_node.cpp",
    (
        *DOOR.headers,
        _HERE / "door_program.h",
        _HERE / "door_activations.h",
        _HERE / "door_node.h",
        _HERE / "door_lists.h",
        _HERE / "kept_memory.h",
        _HERE / "large_pages.h",
    ),
    "torch/csrc/autograd/saved_variable.h",
)


@dataclass(eq=False)
class Compiler:
    """A compiler's process, if it runs, and the wish that none runs any longer."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[str] | None = None

    def failure(self, command: list[str]) -> str | None:
        """What the compiler says is wrong, or None."""
        with self.lock:
            if self.stopped.is_set():
                return _STOPPED
            process = self.process = subprocess.Popen(
                [*_politely(), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,  # an interrupt at the terminal is not for the compiler
            )
        try:
            said = process.communicate(timeout=_COMPILE_TIMEOUT_S)[1]
        except subprocess.TimeoutExpired as error:
            _end(process)
            process.communicate()
            return str(error)
        if process.returncode == 0:
            return None
        if self.stopped.is_set():
            return _STOPPED
        return said.strip()[-2000:] or f"exit status {process.returncode}"

    def stop(self) -> None:
        """End the compiler; start none from here on."""
        with self.lock:
            self.stopped.set()
            process = self.process
        if process is not None and process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)  # the compiler's own processes too


def _politely() -> list[str]:
    """The compiler's work waits for the caller's."""
    nice = shutil.which("nice")
    return [nice, "-n", "10"] if nice else []


def missing(library: Library = DOOR) -> str | None:
    """What this machine lacks to compile a library, or None."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "its table of plans relies on Python's global lock"
    if cpp_build.compiler() is None:
        return cpp_build.reason_not()
    for header in (_python_headers() / "Python.h", _TORCH / "include" / library.header):
        if not header.exists():
            return f"{header} is missing"
    return None


def command(library: Library = DOOR) -> list[str]:
    """The compiler's call, but for its output."""
    return [
        cpp_build.compiler() or "",
        *_FLAGS,
        *cpp_build.sanitizers(),
        f"-I{_TORCH / 'include'}",
        f"-I{_python_headers()}",
        "-shared",
        str(library.source),
        f"-L{_TORCH / 'lib'}",
        *("-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]


def places(command: list[str], library: Library = DOOR) -> list[Path]:
    """Where the library may lie, best first: its name covers whatever it depends on."""
    facts = (*command, torch.__version__, sysconfig.get_config_var("SOABI") or "")
    files = (library.source, *library.headers)
    sources = b"".join(file.read_bytes() for file in files)
    digest = hashlib.sha256("\0".join(facts).encode() + sources).hexdigest()
    folders = cache_dir() / "cpp", Path(tempfile.gettempdir()) / f"fastlinear-{os.getuid()}"
    return [folder / f"{library.source.stem}-{digest[:16]}.so" for folder in folders]


def loaded(libraries: list[Path]) -> ctypes.PyDLL | None:
    """The first library that is there and can be loaded, or None."""
    for library in libraries:
        with suppress(OSError):  # out of reach, damaged, mounted without execution...
            if library.exists():
                _check_owner(library.parent)
                return ctypes.PyDLL(str(library))
    return None


def compiled(
    compiler: Compiler, command: list[str], libraries: list[Path], source: str = DOOR.source.name
) -> ctypes.PyDLL:
    """The library, compiled into the first place that allows it.

    Raises:
        UnsupportedError: the compiler rejects the source, or no place can be written to.
    """
    failures = []
    for library in libraries:
        try:
            library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_owner(library.parent)
            _ensure(compiler, command, library, source)
            return ctypes.PyDLL(str(library))
        except OSError as error:  # read-only, full, mounted without execution...
            failures.append(f"{library.parent}: {error}")
    raise unsupported("a folder to keep the compiled library in", "; ".join(failures))


def _check_owner(folder: Path) -> None:
    facts = folder.stat()
    if facts.st_uid not in (0, os.getuid()) or facts.st_mode & 0o002:
        raise PermissionError(f"others may write to {folder}, and what it holds would be run")


def _ensure(compiler: Compiler, command: list[str], library: Path, source: str) -> None:
    """Compile once, by the first process that asks. Raises OSError where the folder forbids it."""
    lock = FileLock(f"{library}.lock")
    until = time.monotonic() + _COMPILE_TIMEOUT_S
    while not library.exists():
        try:
            with lock.acquire(timeout=0):
                if not library.exists():
                    _compile(compiler, command, library, source)
        except Timeout:
            if time.monotonic() > until:
                raise unsupported("another process to compile it", f"no {library}") from None
            if compiler.stopped.wait(0.1):
                raise unsupported("time to compile", _STOPPED) from None


def _compile(compiler: Compiler, command: list[str], library: Path, source: str) -> None:
    # a plain file, no object that a forked process would clean up
    handle, target = tempfile.mkstemp(dir=library.parent, prefix=library.stem, suffix=".part")
    os.close(handle)
    try:
        said = compiler.failure([*command, "-o", target])
        if said is not None:
            raise unsupported(f"{source} to compile", said)
        os.replace(target, library)
    finally:
        Path(target).unlink(missing_ok=True)


def _python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def unsupported(expected: str, received: str) -> UnsupportedError:
    """The door cannot be: why."""
    return UnsupportedError(
        "fastlinear.ops.common.door",
        expected,
        received,
        "Nothing is lost: calls take the way through Python instead.",
    )
