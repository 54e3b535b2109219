"""The compiled door of fl.mlp: plans looked up and run in one C++ call, where it can be built.

It only shortens the way to a plan. Without a compiler, torch's headers or Python's, calls take
the lookup in ``op.py`` instead, some ten microseconds longer for eight layers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fastlinear.core.errors import UnsupportedError
from fastlinear.core.settings import cache_dir
from fastlinear.ops.common import cpp_build

_SOURCE = Path(__file__).parent / "entry.cpp"
_TORCH = Path(torch.__file__).parent
_COMPILE_TIMEOUT_S = 180
_FLAGS = ("-std=c++20", "-O2", "-fPIC")


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


def reason_not() -> str | None:
    """Why the door cannot be built here, or None."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "its table of plans relies on Python's global lock"
    if cpp_build.compiler() is None:
        return cpp_build.reason_not()
    for header in (_python_headers() / "Python.h", _TORCH / "include" / "ATen" / "EmptyTensor.h"):
        if not header.exists():
            return f"{header} is missing"
    return _failure()


@lru_cache(maxsize=1)
def _failure() -> str | None:
    try:
        _built()
    except UnsupportedError as error:
        return error.received
    return None


@lru_cache(maxsize=1)
def entry() -> Entry | None:
    """The door, compiled if need be; None where it cannot be (``reason_not`` says why)."""
    return _built() if reason_not() is None else None


@lru_cache(maxsize=1)
def _built() -> Entry:
    library = _library()
    make = library.fastlinear_mlp_entry
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
    raise _unsupported("a tensor object that holds its TensorImpl's address", "none")


def _library() -> ctypes.PyDLL:
    command = [
        cpp_build.compiler() or "",
        *_FLAGS,
        f"-I{_TORCH / 'include'}",
        f"-I{_python_headers()}",
        "-shared",
        str(_SOURCE),
        f"-L{_TORCH / 'lib'}",
        *("-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]
    facts = (*command, torch.__version__, sysconfig.get_config_var("SOABI") or "")
    digest = hashlib.sha256("\0".join(facts).encode() + _SOURCE.read_bytes()).hexdigest()
    name = f"entry-{digest[:16]}.so"
    failures = []
    for folder in (cache_dir() / "cpp", Path(tempfile.gettempdir()) / f"fastlinear-{os.getuid()}"):
        try:
            _ensure(command, folder / name)
            return ctypes.PyDLL(str(folder / name))
        except OSError as error:  # read-only, full, mounted without execution...
            failures.append(f"{folder}: {error}")
    raise _unsupported("a folder to keep the compiled library in", "; ".join(failures))


def _ensure(command: list[str], library: Path) -> None:
    """Compile once, by the first process that asks. Raises OSError where the folder forbids it."""
    folder = library.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if facts.st_uid not in (0, os.getuid()) or facts.st_mode & 0o002:
        raise PermissionError(f"others may write to {folder}, and what it holds would be run")
    if library.exists():
        return
    with FileLock(f"{library}.lock"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if library.exists():
            return
        target = Path(scratch) / library.name
        try:
            done = subprocess.run(
                [*command, "-o", str(target)],
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _unsupported(f"{_SOURCE.name} to compile", str(error)) from error
        if done.returncode != 0:
            said = done.stderr.strip()[-2000:] or f"exit status {done.returncode}"
            raise _unsupported(f"{_SOURCE.name} to compile", said)
        os.replace(target, library)


def _python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _unsupported(expected: str, received: str) -> UnsupportedError:
    return UnsupportedError("fastlinear.ops.mlp.entry", expected=expected, received=received)
