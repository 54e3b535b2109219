"""Files that outlive a process: private folders, files written whole, input of limited size."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC  # needs no permission


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, for this user only. Raises OSError."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path) -> int:
    """A handle of a folder that nobody else can write to or exchange.

    The path is resolved, then every step is opened without following links and looked at through
    its handle. Parents may be sticky (``/tmp``).

    Raises:
        FileNotFoundError: there is no such folder.
        PermissionError: the folder is another user's, or group or others may write to it or to a
            parent.
    """
    steps = Path(os.path.realpath(path)).parts
    handle = os.open(steps[0], _STEP)
    try:
        for i, name in enumerate(steps[1:], 1):
            facts = os.fstat(handle)
            if facts.st_mode & _OTHERS_WRITE and not facts.st_mode & stat.S_ISVTX:
                raise _refused(Path(*steps[:i]), "group or others may write there")
            flags = (_FOLDER if i == len(steps) - 1 else _STEP) | os.O_NOFOLLOW
            inner = os.open(name, flags, dir_fd=handle)
            os.close(handle)
            handle = inner
        facts = os.fstat(handle)
        if facts.st_mode & _OTHERS_WRITE:
            raise _refused(Path(*steps), "group or others may write there")
        if not is_ours(facts):
            raise _refused(Path(*steps), f"it belongs to user {facts.st_uid}")
    except BaseException:
        os.close(handle)
        raise
    return handle


def is_ours(facts: os.stat_result) -> bool:
    """Whether a file belongs to this user or to root."""
    return facts.st_uid in (0, os.getuid())


def is_private_file(facts: os.stat_result) -> bool:
    """Whether it is a regular file of ours that nobody else may write to."""
    return stat.S_ISREG(facts.st_mode) and is_ours(facts) and not facts.st_mode & _OTHERS_WRITE


def flush(handle: int) -> None:
    """Wait until the file or folder is on the disk; some file systems cannot say so of a folder."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, _FOLDER)
    try:
        flush(handle)
    finally:
        os.close(handle)


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, on the disk when this returns. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            flush(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def read(path: Path, most: int) -> bytes:
    """The content of a file of at most ``most`` bytes. Raises OSError (EFBIG for a longer one)."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is longer than the {most >> 20} MiB read here", str(path))
    return content


def remedy(error: OSError) -> str:
    """What helps against a disk that refuses, for the last part of an error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space there, or set FASTLINEAR_CACHE_DIR to a folder on another disk."
    return "Set FASTLINEAR_CACHE_DIR to a folder that only you can write to."


def _refused(folder: Path, why: str) -> PermissionError:
    return PermissionError(
        errno.EPERM, f"{why} (chmod go-w), and what lies in the cache would be run", str(folder)
    )
