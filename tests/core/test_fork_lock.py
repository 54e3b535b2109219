"""A lock that forked children find open."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fastlinear.core.fork_lock import ForkLock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_may_take_what_another_thread_of_its_parent_holds() -> None:
    lock, held, done = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:  # ended by the alarm where it waits
        signal.alarm(5)
        with lock:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == 0
