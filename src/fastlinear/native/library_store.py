"""Compiled libraries on disk, each with its digest: loaded only where it is whole and ours.

``NAME.so`` lies beside ``NAME.so.sha256``. Both are checked and loaded through one handle of their
folder, which nobody else can write to. What does not match its digest is compiled anew.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from fastlinear.core import files
from fastlinear.core.settings import cache_dir

LOCK_S = 60.0  # most seconds to wait for another process that compiles the same
_DIGEST = ".sha256"
_SCRATCH = "building-"
_IN_USE = ".lock"
_YOUNG_S = 60.0  # a folder of this age may not be locked yet
_CHECK_S = 0.1
_THROUGH = "/proc/self/fd"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

L = TypeVar("L", bound=ctypes.CDLL)


def folders() -> tuple[Path, Path]:
    """Where libraries may lie, best first: the user's cache, then one beside temporary files."""
    return cache_dir() / "cpp", Path(tempfile.gettempdir()) / f"fastlinear-{os.getuid()}"


def loaded(library: Path, kind: type[L]) -> L | None:
    """The library, or None where none lies there that matches its digest.

    Raises:
        OSError: others may write to its folder, or the system refuses to load it.
    """
    try:
        folder = files.open_private(library.parent)
    except FileNotFoundError:
        return None
    try:
        if not _is_whole(folder, library.name):
            return None
        through = f"{_THROUGH}/{folder}/{library.name}"
        return kind(through if os.path.exists(through) else os.path.realpath(library))
    finally:
        os.close(folder)


def ensure(
    library: Path, compile_: Callable[[Path], None], stopped: Callable[[float], bool]
) -> None:
    """Have the library compiled, by the first process that asks.

    A lock that is held for longer than ``LOCK_S`` is passed by: it only saves work.

    Args:
        library: where it is to lie.
        compile_: (file to write) → compiles it there.
        stopped: (seconds) → waits for so long at most, and says whether to give up.

    Raises:
        OSError: the folder cannot be written, or others may write there.
    """
    files.make_folder(library.parent)
    folder = files.open_private(library.parent)
    try:
        lock = FileLock(f"{library}.lock", mode=0o600, thread_local=False)
        until = time.monotonic() + LOCK_S
        while not _is_whole(folder, library.name):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if time.monotonic() < until:
                    if stopped(_CHECK_S):
                        return
                    continue
            try:
                if not _is_whole(folder, library.name):
                    _sweep(library.parent)
                    _compiled(library, folder, compile_)
                return
            finally:
                lock.release()
    finally:
        os.close(folder)


def _is_whole(folder: int, name: str) -> bool:
    """Whether a private file of that name is there and has the digest beside it."""
    try:
        with os.fdopen(os.open(name + _DIGEST, _READ, dir_fd=folder), "rb") as file:
            told = file.read(65)
        with os.fdopen(os.open(name, _READ, dir_fd=folder), "rb") as file:
            if not files.is_private_file(os.fstat(file.fileno())):
                return False
            return hashlib.file_digest(file, "sha256").hexdigest().encode() == told
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EIO):
            return False
        raise


def _compiled(library: Path, folder: int, compile_: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(dir=library.parent, prefix=_SCRATCH))
    try:
        with FileLock(scratch / _IN_USE, mode=0o600, thread_local=False):
            made = scratch / library.name
            compile_(made)
            digest = scratch / (library.name + _DIGEST)
            with made.open("rb") as file:
                os.fchmod(file.fileno(), 0o700)
                files.flush(file.fileno())
                digest.write_text(hashlib.file_digest(file, "sha256").hexdigest())
            with digest.open("rb") as file:
                files.flush(file.fileno())
            for path in (digest, made):
                os.replace(path, library.with_name(path.name))
        files.flush(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed builds have left: the locks of running ones are held."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError, Timeout):
            if time.time() - scratch.stat().st_mtime > _YOUNG_S:
                with FileLock(scratch / _IN_USE, timeout=0, mode=0o600, thread_local=False):
                    shutil.rmtree(scratch, ignore_errors=True)
