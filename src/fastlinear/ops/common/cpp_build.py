"""Compile a small C++ file for this very processor and load it, once per source and machine.

The library is kept in the user's cache folder under a name made of the hash of the source and of
the headers it includes, the processor and the compiler's flags. Its OpenMP calls are bound to the
OpenMP runtime torch has loaded, so that one pool of threads serves both.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fastlinear.core.device import cpu_name
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.settings import cache_dir

# Strict about NaN, infinities and the order of additions; only errno and traps are given up.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
_COMPILE_S = 300.0  # of a processor to itself; the largest source takes 7
_LONGEST_S = 1800.0
_TORCH_THREADS = "_ZN2at15get_num_threadsEv"  # at::get_num_threads()
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@lru_cache(maxsize=1)
def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else the first of g++, clang++, c++ on the PATH, else None."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else ("g++", "clang++", "c++"):
        found = shutil.which(candidate)
        if found:
            return found
    return None


def sanitizers() -> tuple[str, ...]:
    """The compiler's flags for what ``$FASTLINEAR_SANITIZE`` names, such as ``address,undefined``.

    A library under the address sanitizer loads only into a process that has its runtime preloaded.
    """
    named = os.environ.get("FASTLINEAR_SANITIZE")
    if not named:
        return ()
    # types of torch's classes are not seen from outside; an error ends the process
    checks = f"-fsanitize={named}", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"
    return *checks, "-fno-omit-frame-pointer", "-g1", "-O1"


_seconds: list[float] = []  # of each compilation in this process


def compiled_s() -> float:
    """Seconds that this process has compiled C++ and waited for it, the door's apart."""
    return sum(_seconds)


def reason_not() -> str | None:
    """Why C++ cannot be compiled for this process, or None."""
    if compiler() is None:
        return "no C++ compiler on the PATH (g++, clang++ or c++, or $CXX)"
    if _openmp_runtime() is None:
        return "this build of torch bundles no GNU OpenMP runtime to share threads with"
    return None


# (source, compiler, cache folder) → what came of it; a failure is not tried again in this process.
_outcomes: dict[tuple[Path, str | None, Path], ctypes.CDLL | UnsupportedError] = {}
_lock = threading.Lock()
_forking_thread: int | None = None  # the one thread that a forked process begins with


def _after_fork() -> None:
    global _forking_thread, _lock
    _forking_thread = threading.get_ident()
    _lock = threading.Lock()  # the old one may be held by a thread of the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def load(source: Path) -> ctypes.CDLL:
    """Compile ``source`` if need be and load it; both happen once in a process.

    A failure is remembered until ``$FASTLINEAR_CACHE_DIR`` changes or ``forget`` is called.

    Raises:
        UnsupportedError: there is no compiler, or it rejects the source; the message holds the
            compiler's own words.
    """
    outcome = _outcome(source)
    if isinstance(outcome, UnsupportedError):
        raise UnsupportedError(
            outcome.function,
            outcome.expected,
            outcome.received,
            outcome.remedy,
        ) from outcome
    return outcome


def why_not_loaded(source: Path) -> str | None:
    """Why ``load`` fails for ``source``, or None; compiles it if this was not tried before."""
    outcome = _outcome(source)
    return str(outcome) if isinstance(outcome, UnsupportedError) else None


def failed(source: Path) -> str | None:
    """What ``load`` said when it failed for ``source`` earlier in this process, else None."""
    outcome = _outcomes.get(_key(source))
    return outcome.received if isinstance(outcome, UnsupportedError) else None


def address(function: Any) -> int:
    """Where a library's function lies, for the door's programs."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def ask_torch_for_threads(set_count: Any) -> None:
    """Give ``threads.h`` of a library torch's own count of threads, by the library's function.

    OpenMP does not know what ``torch.set_num_threads`` said in a thread that torch has not used.
    """
    torch_library = ctypes.CDLL(torch._C.__file__)
    if hasattr(torch_library, _TORCH_THREADS):
        set_count.argtypes = [ctypes.c_void_p]
        set_count(ctypes.cast(torch_library[_TORCH_THREADS], ctypes.c_void_p))


def forget() -> None:
    """Let every source be tried again."""
    _outcomes.clear()


def sources(source: Path) -> tuple[Path, ...]:
    """The file and, each once, the files that it and they include by a name in quotes."""
    found: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop(0)
        if path not in found and path.exists():
            found[path] = None
            names = _INCLUDE.findall(path.read_text(encoding="utf-8"))
            waiting += [path.parent / name for name in names]
    return tuple(found)


def _key(source: Path) -> tuple[Path, str | None, Path]:
    return source, compiler(), cache_dir()


def _outcome(source: Path) -> ctypes.CDLL | UnsupportedError:
    key = _key(source)
    with _lock:
        outcome = _outcomes.get(key)
        if outcome is None:
            try:
                outcome = _load(source)
            except UnsupportedError as error:
                outcome = error.with_traceback(None)
            _outcomes[key] = outcome
    return outcome


def _load(source: Path) -> ctypes.CDLL:
    why = reason_not()
    if why is not None:
        raise UnsupportedError("cpp_build.load", "a C++ compiler", why, "Install g++.")
    runtime = _openmp_runtime()
    assert runtime is not None
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    wide = ("-mprefer-vector-width=512",) if "AVX512" in _capability() else ()
    command = [compiler() or "", *_FLAGS, *wide, *sanitizers()]
    digest = hashlib.sha256("\0".join([*command, *_processor()]).encode())
    for path in sources(source):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    name = f"{source.stem}-{digest.hexdigest()[:16]}.so"
    failures = []
    for folder in (cache_dir() / "cpp", Path(tempfile.gettempdir()) / f"fastlinear-{os.getuid()}"):
        try:
            return _told_of_fork(ctypes.CDLL(str(_built(command, source, folder / name))))
        except OSError as error:  # read-only, full, mounted without execution...
            failures.append(f"{folder}: {error}")
    raise UnsupportedError(
        "cpp_build.load",
        "a folder to keep the compiled library in and to load it from",
        "; ".join(failures),
        "Set FASTLINEAR_CACHE_DIR to a writable folder.",
    )


def _told_of_fork(library: ctypes.CDLL) -> ctypes.CDLL:
    """A library notices later forks by itself; where it needs to, it takes in earlier ones."""
    if _forking_thread is not None and hasattr(library, "fastlinear_forked"):
        library.fastlinear_forked(ctypes.c_uint64(_forking_thread))
    return library


def _built(command: list[str], source: Path, library: Path) -> Path:
    """The library, compiled by the first process that asks. Raises OSError where it cannot be."""
    folder = library.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if facts.st_uid not in (0, os.getuid()) or facts.st_mode & 0o002:
        raise PermissionError("others may write there, and what it holds would be run")
    if not library.exists():
        with FileLock(f"{library}.lock"):
            if not library.exists():
                begin = time.monotonic()
                _compile(command, source, library)
                _seconds.append(time.monotonic() - begin)
    return library


def _processor() -> tuple[str, str]:
    """Model name and feature flags: a virtual machine may hide some of its model's."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return cpu_name(), flags.group(1) if flags else ""


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


@lru_cache(maxsize=1)
def _openmp_runtime() -> str | None:
    folder = Path(torch.__file__).parent
    for pattern in (folder / "lib" / "libgomp*.so*", folder.parent / "torch.libs" / "libgomp*.so*"):
        found = sorted(glob.glob(str(pattern)))
        if found:
            return found[0]
    return None


def _compile(command: list[str], source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        target = Path(scratch) / library.name
        objects = Path(scratch) / "source.o"
        steps = (
            [*command, "-c", str(source), "-o", str(objects)],
            # linked without -fopenmp: its symbols come from torch's own runtime
            [command[0], "-shared", *sanitizers(), str(objects), "-o", str(target)],
        )
        for step in steps:
            said = _failure(step)
            if said is not None:
                raise UnsupportedError(
                    "cpp_build.load",
                    f"{source.name} to compile",
                    said,
                    "Name a working C++17 compiler in $CXX.",
                )
        os.replace(target, library)


def _failure(command: list[str]) -> str | None:
    """What went wrong when the compiler ran, in its own words, or None."""
    limit = _limit_s()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} had not ended after {limit:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    return done.stderr.strip()[-2000:] or f"exit status {done.returncode}"


def _limit_s() -> float:
    """Seconds until a compiler counts as stuck: more where others use the processors, too."""
    try:
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        waiting = 1.0
    return min(_LONGEST_S, _COMPILE_S * max(1.0, waiting))
