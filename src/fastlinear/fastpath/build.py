"""Libraries built once a process, away from their callers.

One compiled earlier is loaded at once; else a thread compiles it while calls go on.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path

from fastlinear.core.errors import InputError, NotYetError, UnsupportedError
from fastlinear.core.interrupts import whole
from fastlinear.fastpath import library as fastpath_library
from fastlinear.native.compiler import Compiler

_STOP_TIMEOUT_S = 5
_compiling: list[Build] = []  # by threads of this process


@dataclass(eq=False)
class Build:
    """How far this process is with one library.

    Attributes:
        library: what is compiled.
        made: prepares what was loaded.
        tell: called once it is there or cannot be, maybe by another thread.
        done: set once it is there or cannot be.
        loaded: the library, as ``made`` returned it.
        failure: why it cannot be.
    """

    library: fastpath_library.Library
    made: Callable[[ctypes.PyDLL], ctypes.PyDLL]
    tell: Callable[[], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    compiler: Compiler = field(default_factory=Compiler)
    loaded: ctypes.PyDLL | None = None
    failure: str | None = None

    def start(self) -> None:
        """Load the library, or have a thread compile it; only the first call does."""
        if self.started:
            return
        with self.lock:
            if self.started:
                return
            self.started = True
        try:
            self._begin()
        except UnsupportedError as error:
            self._finish(failure=error.received)
        except InputError as error:  # in a setting that the library reads
            self._finish(failure=str(error))
        except (OSError, RuntimeError) as error:  # no file can be read, no thread started any more
            self._finish(failure=str(error))

    def stop(self) -> None:
        """Leave no compiler behind."""
        self.compiler.stop()
        self.done.wait(_STOP_TIMEOUT_S)

    def reason_not(self) -> str | None:
        """Why it will not be there in this process, or None. Compiles and waits for nothing."""
        return self.failure or fastpath_library.missing(self.library)

    def _begin(self) -> None:
        why = fastpath_library.missing(self.library)
        if why is not None:
            self._finish(failure=why)
            return
        command = fastpath_library.command(self.library)
        places = fastpath_library.places(command, self.library)
        found = fastpath_library.loaded(places)
        if found is not None:
            self._finish(loaded=self.made(found))
            return
        _compiling.append(self)
        Finalize(None, Build.stop, (self,), exitpriority=10)  # when worker processes end as well
        threading.Thread(
            target=self._work, args=(command, places), name="fastlinear-fastpath", daemon=True
        ).start()

    def _work(self, command: list[str], places: list[Path]) -> None:
        try:
            loaded = self.made(
                fastpath_library.compiled(self.compiler, command, places, self.library.source.name)
            )
        except UnsupportedError as error:
            self._finish(failure=error.received)
        except InputError as error:
            self._finish(failure=str(error))
        except Exception as error:  # noqa: BLE001 - nobody to raise to here; reason_not tells
            self._finish(failure=f"{type(error).__name__}: {error}")
        else:
            self._finish(loaded=loaded)

    def _finish(self, *, loaded: ctypes.PyDLL | None = None, failure: str | None = None) -> None:
        self.loaded, self.failure = loaded, failure
        self.tell()
        self.done.set()

    @property
    def under_way(self) -> bool:
        """Whether a thread of this process, or of the one it was forked from, is at it."""
        return self.started and not self.done.is_set()


_until: ContextVar[float | None] = ContextVar("until", default=None)


@whole
def patience(seconds: float) -> Iterator[None]:
    """Inside, waits for libraries take so long at most, all together; then NotYetError follows."""
    token = _until.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _until.reset(token)


def waited(build: Build, timeout: float | None) -> bool:
    """Whether the library is there, waiting up to ``timeout`` seconds for it (None: as long as it
    takes). Raises NotYetError where ``patience`` ends before that."""
    until = _until.get()
    if until is None:
        build.done.wait(timeout)
    else:
        left = max(0.0, until - time.monotonic())
        shorter = timeout is not None and timeout < left
        if not build.done.wait(timeout if shorter else left) and not shorter:
            raise NotYetError
    return build.loaded is not None


def is_compiling() -> bool:
    """Whether this process is compiling one by now."""
    return any(build.under_way for build in _compiling)


def settle(timeout: float) -> None:
    """Wait for what is being compiled, at most ``timeout`` seconds in all; starts nothing."""
    until = time.monotonic() + timeout
    for build in _compiling:
        build.done.wait(max(0.0, until - time.monotonic()))


def after_fork(begin_anew: Callable[[], None]) -> None:
    """Have ``begin_anew`` called in forked children, where no thread of the parent is."""
    os.register_at_fork(after_in_child=begin_anew)


after_fork(_compiling.clear)
