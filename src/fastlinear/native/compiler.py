"""The C++ compiler: which one, and a run of it that can be stopped."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

STOPPED = "the process ends"
_COMPILE_S = 300.0  # of a processor to itself; the largest source takes 7
_LONGEST_S = 1800.0
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def compiler() -> tuple[str, ...] | None:
    """The C++ compiler with its leading arguments: ``$CXX``, split as a shell does, else the first
    of g++, clang++, c++ on the PATH, else None."""
    return _found(os.environ.get("CXX"), os.environ.get("PATH"))


@lru_cache(maxsize=4)
def _found(named: str | None, _path: str | None) -> tuple[str, ...] | None:
    try:
        candidates = (shlex.split(named),) if named else (["g++"], ["clang++"], ["c++"])
    except ValueError:  # a quotation without an end
        return None
    for program, *rest in filter(None, candidates):
        found = shutil.which(os.path.expanduser(program))
        if found:
            return (found, *rest)
    return None


@dataclass(eq=False)
class Compiler:
    """A compiler's process, if it runs, and the wish that none runs any longer.

    ``polite``: its work waits for the caller's.
    """

    polite: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[str] | None = None

    def failure(self, command: list[str], scratch: Path) -> str | None:
        """What the compiler says is wrong, or None; its temporary files lie in ``scratch``.

        Raises OSError where it says that the disk is full or cannot be written.
        """
        limit = limit_s()
        try:
            with self.lock:
                if self.stopped.is_set():
                    return STOPPED
                process = self.process = subprocess.Popen(
                    [*(_politely() if self.polite else []), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    process_group=0,  # an interrupt at the terminal is not for the compiler
                    env={**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"},
                )
        except OSError as error:
            return str(error)
        try:
            said = process.communicate(timeout=limit)[1]
        except subprocess.TimeoutExpired:
            _end(process)
            process.communicate()
            return f"{command[0]} had not ended after {limit:.0f} s"
        if process.returncode == 0:
            return None
        if self.stopped.is_set():
            return STOPPED
        for code in _OF_THE_DISK:
            if os.strerror(code) in said:
                raise OSError(code, os.strerror(code))
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
    nice = shutil.which("nice")
    return [nice, "-n", "10"] if nice else []


def limit_s() -> float:
    """Seconds until a compiler counts as stuck: more where others use the processors, too."""
    try:
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        waiting = 1.0
    return min(_LONGEST_S, _COMPILE_S * max(1.0, waiting))
