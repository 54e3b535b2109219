"""Ctrl-C at any instant, and the process is as it was.

A signal's handler may raise between any two steps of Python, also while a context manager is being
entered or left. So public functions that change the process's state are ``restored``:

- the first exception of a handler is let through, the next ones wait until what it ended is put
  back; what cannot be ended halfway is done inside ``hold``;
- context managers that must be left are ``whole``;
- where an exception leaves the function, the state noted before is put back.

Signals reach the main thread alone; elsewhere only the last holds.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from fastlinear.core.process_state import ProcessState

LONGEST_S = 10.0  # that a signal is held back; then it counts as meant

P = ParamSpec("P")
T = TypeVar("T")

_FOREVER = float("inf")
_calm_until = 0.0  # on the monotonic clock: signals that come before are kept in _waiting
_interrupted = False  # whether a handler has raised and that is still under way
_waiting: list[int] = []
_replaced: dict[int, Callable[[int, FrameType | None], Any]] = {}  # signal → its own handler
_open: list[Whole[Any]] = []
_inside = threading.local()


def restored(function: Callable[P, T]) -> Callable[P, T]:
    """A function after which, where it raises anything, the process and the modules given to it are
    as they were. A signal that waits at its end counts as having come before."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if getattr(_inside, "function", False):
            return function(*args, **kwargs)
        global _calm_until
        state: ProcessState | None = None
        first = len(_open)
        done = False
        try:
            try:
                _inside.function = True
                _replace_handlers()
                state = ProcessState((*args, *kwargs.values()))
                _let_signals_come()
                result = function(*args, **kwargs)
            finally:
                if _is_main():
                    _calm_until = _FOREVER
            _deliver_all()
            done = True
        finally:
            if not done:
                _leave(first)
                if state is not None:
                    state.put_back()
            _inside.function = False
            _put_handlers_back()
        return result

    return call


class hold(AbstractContextManager[None]):
    """Inside it signals wait, for ``LONGEST_S`` at most; they come as it is left."""

    def __enter__(self) -> None:
        global _calm_until
        self._main = _is_main()
        if self._main:
            self._alone = not _replaced
            if self._alone:
                _replace_handlers()
            self._before = 0.0 if self._alone else _calm_until
            self._until = _calm_until = max(self._before, time.monotonic() + LONGEST_S)

    def __exit__(self, *_: object) -> None:
        global _calm_until
        if not self._main:
            return
        if self._alone:
            _put_handlers_back()
        elif _calm_until == self._until:  # else a signal came through, and all is being left
            _calm_until = self._before
            _deliver()


class Whole(AbstractContextManager[T], Generic[T]):
    """A context manager that is entered and left in one go, and left for certain inside
    ``restored``."""

    def __init__(self, inner: AbstractContextManager[T]) -> None:
        self._inner = inner

    def __enter__(self) -> T:
        with hold():
            value = self._inner.__enter__()
            _open.append(self)
        return value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        with hold():
            if self not in _open:
                return None
            _open.remove(self)
            return self._inner.__exit__(kind, error, trace)


def whole(function: Callable[P, Iterator[T]]) -> Callable[P, Whole[T]]:
    """``contextlib.contextmanager`` whose managers are ``Whole``."""
    made = contextmanager(function)

    @functools.wraps(function)
    def enter(*args: P.args, **kwargs: P.kwargs) -> Whole[T]:
        return Whole(made(*args, **kwargs))

    return enter


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _replace_handlers() -> None:
    """Have all handlers wait for ``_let_signals_come``."""
    global _calm_until
    if not _is_main():
        return
    _calm_until = _FOREVER
    for number in signal.valid_signals():
        own = signal.getsignal(number)
        if callable(own):
            _replaced[number] = own
            signal.signal(number, _handle)


def _let_signals_come() -> None:
    global _calm_until
    if _is_main():
        _calm_until = 0.0
        _deliver()


def _deliver() -> None:
    if _waiting and time.monotonic() >= _calm_until:
        _handle(_waiting.pop(0), sys._getframe())


def _deliver_all() -> None:
    """At the end of a function that returns: what an earlier signal raised was caught in it."""
    global _interrupted
    if not _is_main():
        return
    while _waiting:
        number = _waiting.pop(0)
        _interrupted = True
        _replaced[number](number, sys._getframe())
    _interrupted = False


def _put_handlers_back() -> None:
    """The handlers as they were, then what waited: once, unless an interrupt is leaving already."""
    global _calm_until, _interrupted
    if not _is_main():
        return
    late = [(number, _replaced[number]) for number in _waiting]
    while _replaced:
        number, own = next(iter(_replaced.items()))
        if signal.getsignal(number) == _handle:  # the function may have set one
            signal.signal(number, own)
        del _replaced[number]
    _waiting.clear()
    _calm_until = 0.0
    leaving, _interrupted = _interrupted, False
    if late and not leaving:
        number, own = late[0]
        own(number, sys._getframe())


def _handle(number: int, frame: FrameType | None) -> None:
    global _calm_until, _interrupted
    now = time.monotonic()
    if now < _calm_until:
        if number not in _waiting:
            _waiting.append(number)
        return
    before, _calm_until = _calm_until, now + LONGEST_S
    _interrupted = True
    _replaced[number](number, frame)
    _interrupted, _calm_until = False, before  # it has not raised


def _leave(first: int) -> None:
    """Leave what an exception kept from being left: first what frames hold that it came out of."""
    error = sys.exc_info()[1]
    if error is not None and _interrupted:
        traceback.clear_frames(error.__traceback__)
    while len(_open) > first:
        with suppress(Exception):
            _open.pop()._inner.__exit__(None, None, None)
