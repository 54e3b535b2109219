"""The compiled door of fl.mlp: plans looked up and run in one C++ call, where it can be built.

It only shortens the way to a plan. Until it is there, and where it cannot be built, calls take the
lookup in ``op.py`` instead, some ten microseconds longer for eight layers. A library compiled
earlier is loaded at the first plan; else a thread compiles it while calls go on.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from fastlinear.core.errors import UnsupportedError
from fastlinear.ops.mlp import entry_library as library

PATIENCE_S = 60.0  # most seconds to wait before something is timed
_STOP_TIMEOUT_S = 5


@dataclass(frozen=True)
class Entry:
    """The door's functions.

    Attributes:
        call: (x, weights, biases, activation, final_activation, backend, fast) → the result, or
            None where no plan is known for such a call.
        admit: the same arguments and a plan: a callable (x, weights, biases) → result, or
            (address of fastlinear_mlp_forward, activation codes).
        clear: forget all plans.
    """

    call: Callable[..., Any]
    admit: Callable[..., bool]
    clear: Callable[[], None]


@dataclass(eq=False)
class _Build:
    """How far this process is with its door."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    started: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    compiler: library.Compiler = field(default_factory=library.Compiler)
    door: Entry | None = None
    failure: str | None = None


_build = _Build()
_listeners: list[Callable[[], None]] = []


def entry() -> Entry | None:
    """The door if it is there. The first call has it loaded or built; no call waits for that."""
    build = _build
    if not build.started:
        _start(build)
    return build.door


def wait(timeout: float | None = None) -> Entry | None:
    """The door, waiting up to ``timeout`` seconds for it (None: as long as it takes).

    For what measures. None where the time was too short or the door cannot be built:
    ``reason_not`` tells the one from the other.
    """
    entry()
    _build.done.wait(timeout)
    return _build.door


def settle(timeout: float = PATIENCE_S) -> None:
    """Wait for a build that is under way, at most ``timeout`` seconds; starts none.

    What is timed while the compiler runs is neither with the door nor on a quiet machine.
    """
    if _build.started:
        _build.done.wait(timeout)


def reason_not() -> str | None:
    """Why there will be no door in this process, or None. Compiles nothing, waits for nothing."""
    return _build.failure or library.missing()


def on_ready(listener: Callable[[], None]) -> None:
    """Call ``listener`` once the door can serve, so that plans made before are made known to it.

    It may be called from another thread. A process forked while its parent was building has it
    called as well, to begin anew.
    """
    _listeners.append(listener)


# --------------------------------------------------------------------------------------------
# One build a process, away from its callers


def _start(build: _Build) -> None:
    with build.lock:
        if build.started:
            return
        build.started = True
    try:
        _begin(build)
    except UnsupportedError as error:
        _finish(build, failure=error.received)
    except (OSError, RuntimeError) as error:  # no file can be read, or no thread started any more
        _finish(build, failure=str(error))


def _begin(build: _Build) -> None:
    why = library.missing()
    if why is not None:
        _finish(build, failure=why)
        return
    command = library.command()
    places = library.places(command)
    found = library.loaded(places)
    if found is not None:
        _finish(build, door=_made(found))
        return
    Finalize(None, _stop, (build,), exitpriority=10)  # at the exit of worker processes as well
    threading.Thread(
        target=_work, args=(build, command, places), name="fastlinear-door", daemon=True
    ).start()


def _work(build: _Build, command: list[str], places: list[Path]) -> None:
    try:
        door = _made(library.compiled(build.compiler, command, places))
    except UnsupportedError as error:
        _finish(build, failure=error.received)
    except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to; reason_not tells
        _finish(build, failure=f"{type(error).__name__}: {error}")
    else:
        _finish(build, door=door)


def _finish(build: _Build, *, door: Entry | None = None, failure: str | None = None) -> None:
    build.door, build.failure = door, failure
    if door is not None:
        _tell()
    build.done.set()


def _tell() -> None:
    for listener in _listeners:
        listener()


def _stop(build: _Build) -> None:
    """Leave no compiler behind."""
    build.compiler.stop()
    build.done.wait(_STOP_TIMEOUT_S)


def _begin_anew() -> None:
    """In a forked child: the parent's thread is not here."""
    global _build
    if _build.started and not _build.done.is_set():
        _build = _Build()
        _tell()


os.register_at_fork(after_in_child=_begin_anew)


def _made(loaded: ctypes.PyDLL) -> Entry:
    make = loaded.fastlinear_mlp_entry
    make.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.c_int64]
    make.restype = ctypes.py_object
    return Entry(*make(torch.Tensor, torch.nn.Parameter, _impl_offset()))


def _impl_offset() -> int:
    """Where in a tensor object its TensorImpl's address lies, found in a live tensor."""
    t = torch.empty(0)
    word = ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_size_t * (torch.Tensor.__basicsize__ // word)).from_address(id(t))
    for i, value in enumerate(words):
        if value == t._cdata:
            return i * word
    raise library.unsupported("a tensor object that holds its TensorImpl's address", "none")
