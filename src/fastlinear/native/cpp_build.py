"""Compile a small C++ file for this very processor and load it, once per source and machine.

The library is kept in the user's cache folder under a name made of the hash of the source and of
the headers it includes, the processor and the compiler's flags. Its OpenMP calls are bound to the
OpenMP runtime torch has loaded, so that one pool of threads serves both.

A thread compiles. A call that nobody forced to C++ waits ``PATIENCE_S`` for it (``LOCK_PATIENCE_S``
for another process), then takes another backend; plans are made anew once the library is there.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from fastlinear.activations.reference import CPP_MACRO
from fastlinear.core import files
from fastlinear.core.device import cpu_name
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.settings import cache_dir
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import about_to_run
from fastlinear.native import library_store
from fastlinear.native.compiler import STOPPED, Compiler
from fastlinear.native.compiler import compiler as compiler

PATIENCE_S = 60.0  # of a call that has another backend to take
LOCK_PATIENCE_S = 10.0  # of such a call, for what another process compiles
_STOP_S = 5.0
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
_ACTIVATIONS = Path(__file__).parents[1] / "activations" / "cpp.h"  # needs the list of them
_QUIET_S = 1.0  # of waiting before a line says why
_TORCH_THREADS = "_ZN2at15get_num_threadsEv"  # at::get_num_threads()
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


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


_log = logging.getLogger("fastlinear")
_seconds: list[float] = []  # of each wait in this process


def compiled_s() -> float:
    """Seconds that calls of this process have waited for C++ to be compiled, the fast path's
    apart."""
    return sum(_seconds)


def reason_not() -> str | None:
    """Why C++ cannot be compiled for this process, or None."""
    if compiler() is None:
        return "no C++ compiler on the PATH (g++, clang++ or c++, or $CXX)"
    if _openmp_runtime() is None:
        return "this build of torch bundles no GNU OpenMP runtime to share threads with"
    return None


@dataclass(eq=False)
class _Build:
    """How far this process is with one library.

    Attributes:
        source: what is compiled.
        done: set once it is there or cannot be.
        library: the library once it is there.
        error: why it cannot be.
        left: whether a call has gone on without it.
        elsewhere: whether another process compiles it.
    """

    source: Path
    done: threading.Event = field(default_factory=threading.Event)
    compiler: Compiler = field(default_factory=lambda: Compiler(polite=False))
    library: ctypes.CDLL | None = None
    error: UnsupportedError | None = None
    left: bool = False
    elsewhere: bool = False
    told: bool = False

    def start(self) -> None:
        """Load the library, or have a thread compile it."""
        try:
            cxx, flags, places = _prepared(self.source)
            self.library = _found(places)
        except UnsupportedError as error:
            self.error = error.with_traceback(None)
        if self.library is not None or self.error is not None:
            self.done.set()
            return
        Finalize(None, _Build.stop, (self,), exitpriority=10)  # when worker processes end as well
        thread = threading.Thread(
            target=self._work, args=(cxx, flags, places), name="fastlinear-cpp", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread can be started any more
            self._work(cxx, flags, places)

    def stop(self) -> None:
        """Leave no compiler behind."""
        self.compiler.stop()
        self.done.wait(_STOP_S)

    def wait(self, patient: bool) -> bool:
        """Whether it is done, waiting for it: as long as it takes where ``patient``."""
        if self.done.is_set() or (self.left and not patient):
            return self.done.is_set()
        begin = time.monotonic()
        try:
            if not self.done.wait(_QUIET_S):
                self._tell(patient)
                if patient:
                    self.done.wait()
                elif not self.done.wait(LOCK_PATIENCE_S - _QUIET_S) and not self.elsewhere:
                    self.done.wait(PATIENCE_S - LOCK_PATIENCE_S)
        finally:
            _seconds.append(time.monotonic() - begin)
        return self.done.is_set()

    def under_way(self) -> str:
        """Why the library is not there yet."""
        who = "another process" if self.elsewhere else "a thread"
        return f"{who} still compiles {self.source.name}"

    def _tell(self, patient: bool) -> None:
        if not self.told:
            self.told = True
            who = "another process compiles" if self.elsewhere else "compiling"
            most = LOCK_PATIENCE_S if self.elsewhere else PATIENCE_S
            until = "" if patient else f" {most:.0f} s at most, then takes another backend"
            _log.warning(
                "fastlinear: %s %s for this processor, once; this call waits%s",
                *(who, self.source.name, until),
            )

    def _work(self, cxx: list[str], flags: list[str], places: list[Path]) -> None:
        try:
            self.library = self._compiled(cxx, flags, places)
        except UnsupportedError as error:
            self.error = error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - nobody to raise to here; load does
            self.error = _unsupported(f"{self.source.name} to compile", repr(error), "Report it.")
        self.done.set()
        if self.left:
            cache.changed()

    def _compiled(self, cxx: list[str], flags: list[str], places: list[Path]) -> ctypes.CDLL:
        failures, remedies = [], []
        for library in places:
            try:
                _built((self, cxx, flags), self.source, library)
                found = library_store.loaded(library, ctypes.CDLL)
                if found is not None:
                    return _told(found)
                failures.append(f"{library.parent}: {STOPPED}")
            except OSError as error:  # read-only, full, mounted without execution...
                failures.append(f"{library.parent}: {error}")
                remedies.append(files.remedy(error))
        raise _unsupported(
            "a folder to keep the compiled library in and to load it from",
            "; ".join(failures),
            (remedies or ["Call again."])[0],
        )

    def locked(self, seconds: float) -> bool:
        """Whether to give up, after so many seconds in which another process compiles."""
        self.elsewhere = True
        return self.compiler.stopped.wait(seconds)


def _built(how: tuple[_Build, list[str], list[str]], source: Path, library: Path) -> None:
    """Have the library compiled by the first process that asks. Raises as ``_compile``."""
    build, cxx, flags = how

    def compile_(made: Path) -> None:
        build.elsewhere = False
        _compile(build.compiler, cxx, flags, source, made)

    library_store.ensure(library, compile_, build.locked)


# (source, compiler, cache folder) → what comes of it; a failure is not tried again in this process.
_builds: dict[tuple[Path, tuple[str, ...] | None, Path], _Build] = {}
_lock = threading.Lock()
_forking_thread: int | None = None  # the one thread that a forked process begins with


def _after_fork() -> None:
    global _forking_thread, _lock
    _forking_thread = threading.get_ident()
    _lock = threading.Lock()  # the old one may be held by a thread of the parent
    for key, build in list(_builds.items()):
        if not build.done.is_set():  # by a thread of the parent
            del _builds[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def asked_once(answer: Callable[[], str | None]) -> Callable[[], str | None]:
    """The answer kept until choices change, as they do when a late library is there."""
    kept = lru_cache(maxsize=1)(answer)
    cache.on_change(kept.cache_clear)
    return kept


def load(source: Path) -> ctypes.CDLL:
    """Compile ``source`` if need be and load it; both happen once in a process.

    Waits as long as that takes. A failure is remembered until ``$FASTLINEAR_CACHE_DIR`` or ``$CXX``
    changes or ``forget`` is called.

    Raises:
        UnsupportedError: there is no compiler, or it rejects the source (the message holds its own
            words), or no folder can keep the library.
    """
    build = _build(source)
    build.wait(patient=True)
    if build.error is not None:
        raise UnsupportedError(*build.error.args) from build.error
    assert build.library is not None
    return build.library


def load_calls(source: Path, result: Any = None, **pointers: int) -> ctypes.CDLL:
    """``load``, for a library whose functions take pointers alone.

    Args:
        result: what the functions return, as ctypes names it.
        pointers: each function's name, and how many it takes.
    """
    library = load(source)
    for name, count in pointers.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * count, result
    return library


def why_not_loaded(source: Path) -> str | None:
    """Why ``load`` fails for ``source``, or None; compiles it if this was not tried before.

    Waits for a limited time; a library that comes later is taken by the plans made from then on.
    """
    build = _build(source)
    if not build.wait(patient=False):
        build.left = True
        if not build.done.is_set():
            return build.under_way()
    return None if build.error is None else str(build.error)


def failed(source: Path) -> str | None:
    """What ``load`` said when it failed for ``source`` earlier in this process, or that calls do
    not wait for it any longer; else None. Compiles where the asking backend is about to run."""
    if about_to_run.get() and reason_not() is None:
        why_not_loaded(source)
    build = _builds.get(_key(source))
    if build is None:
        return None
    if not build.done.is_set():
        return build.under_way() if build.left else None
    return None if build.error is None else build.error.received


def address(function: Any) -> int:
    """Where a library's function lies, for the fast path's tapes."""
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
    with _lock:
        _builds.clear()
    cache.changed()


def sources(source: Path) -> tuple[Path, ...]:
    """The file and, each once, the files that it and they include by a name in quotes."""
    found: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop(0)
        if path not in found and path.exists():
            found[path] = None
            names = _INCLUDE.findall(path.read_text(encoding="utf-8"))
            waiting += [Path(os.path.normpath(path.parent / name)) for name in names]
    return tuple(found)


def _key(source: Path) -> tuple[Path, tuple[str, ...] | None, Path]:
    return source, compiler(), cache_dir()


def _build(source: Path) -> _Build:
    key = _key(source)
    with _lock:
        build = _builds.get(key)
        if build is None:
            build = _Build(source)
            build.start()
            _builds[key] = build
    return build


def _prepared(source: Path) -> tuple[list[str], list[str], list[Path]]:
    """The compiler, its flags, and where the library may lie. Raises UnsupportedError."""
    why = reason_not()
    if why is not None:
        raise _unsupported("a C++ compiler", why, "Install g++.")
    runtime = _openmp_runtime()
    assert runtime is not None
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    wide = ("-mprefer-vector-width=512",) if "AVX512" in _capability() else ()
    files = sources(source)
    listed = (f"-D{CPP_MACRO}",) if _ACTIVATIONS in files else ()
    cxx, flags = [*(compiler() or ())], [*_FLAGS, *wide, *listed, *sanitizers()]
    digest = hashlib.sha256("\0".join([*cxx, *flags, *_processor()]).encode())
    for path in files:
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    name = f"{source.stem}-{digest.hexdigest()[:16]}.so"
    return cxx, flags, [folder / name for folder in library_store.folders()]


def _found(places: list[Path]) -> ctypes.CDLL | None:
    for library in places:
        with suppress(OSError):  # writable for others, mounted without execution...
            found = library_store.loaded(library, ctypes.CDLL)
            if found is not None:
                return _told(found)
    return None


def _unsupported(expected: str, received: str, remedy: str) -> UnsupportedError:
    return UnsupportedError("cpp_build.load", expected, received, remedy)


def _told(library: ctypes.CDLL) -> ctypes.CDLL:
    """A library with ``threads.h`` asks torch for threads. It notices later forks by itself; where
    it needs to, it takes in earlier ones."""
    if hasattr(library, "fastlinear_threads"):
        ask_torch_for_threads(library.fastlinear_threads)
    if _forking_thread is not None and hasattr(library, "fastlinear_forked"):
        library.fastlinear_forked(ctypes.c_uint64(_forking_thread))
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


def _compile(run: Compiler, cxx: list[str], flags: list[str], source: Path, library: Path) -> None:
    """Raises UnsupportedError where the compiler rejects the source, OSError where a disk does."""
    objects = library.with_suffix(".o")
    for step in (
        [*cxx, *flags, "-c", str(source), "-o", str(objects)],
        # linked without -fopenmp: its symbols come from torch's own runtime
        [*cxx, "-shared", *sanitizers(), str(objects), "-o", str(library)],
    ):
        said = run.failure(step, library.parent)
        if said is not None:
            remedy = "Call again." if said == STOPPED else "Name a working C++17 compiler in $CXX."
            raise _unsupported(f"{source.name} to compile", said, remedy)
