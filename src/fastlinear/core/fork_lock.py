"""A lock that a forked child finds open, whatever threads of its parent held."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()


class ForkLock:
    """A reentrant lock, made anew in forked children, where no other thread is left to open it."""

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        """Open it, for the only thread of a forked child."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _after_fork() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
