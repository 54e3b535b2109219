"""The compiled fast path's libraries: what they are made of and where they lie."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fastlinear.core.errors import UnsupportedError
from fastlinear.native import cpp_build, library_store
from fastlinear.native.compiler import STOPPED, Compiler

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-DAT_PER_OPERATOR_HEADERS")


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        source: the file that is compiled.
        headers: our own files that it includes.
        header: a file of torch's that it needs, below torch's folder of headers.
    """

    source: Path
    headers: tuple[Path, ...]
    header: str


FASTPATH = Library(
    _HERE / "lookup.cpp",
    (_HERE / "call.h", _HERE / "plans.h"),
    "ATen/EmptyTensor.h",
)
NODE = Library(
    _HERE / "autograd_node.cpp",
    (
        *FASTPATH.headers,
        _HERE / "tape.h",
        _HERE / "unboxed.h",
        _HERE / "autograd_node.h",
        _HERE / "known_layer.h",
        _HERE / "lists.h",
        _HERE / "../kernels/cpu/allocator.h",
        _HERE / "../kernels/cpu/large_pages.h",
    ),
    "torch/csrc/autograd/saved_variable.h",
)


def missing(library: Library = FASTPATH) -> str | None:
    """What this machine lacks to compile a library, or None."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "its table of plans relies on Python's global lock"
    if cpp_build.compiler() is None:
        return cpp_build.reason_not()
    for header in (_python_headers() / "Python.h", _TORCH / "include" / library.header):
        if not header.exists():
            return f"{header} is missing"
    return None


def command(library: Library = FASTPATH) -> list[str]:
    """The compiler's call, but for its output."""
    return [
        *(cpp_build.compiler() or ()),
        *_FLAGS,
        *cpp_build.sanitizers(),
        f"-I{_TORCH / 'include'}",
        f"-I{_python_headers()}",
        "-shared",
        str(library.source),
        f"-L{_TORCH / 'lib'}",
        *("-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]


def places(command: list[str], library: Library = FASTPATH) -> list[Path]:
    """Where the library may lie, best first: its name covers whatever it depends on."""
    facts = (*command, torch.__version__, sysconfig.get_config_var("SOABI") or "")
    files = (library.source, *library.headers)
    sources = b"".join(file.read_bytes() for file in files)
    digest = hashlib.sha256("\0".join(facts).encode() + sources).hexdigest()
    name = f"{library.source.stem}-{digest[:16]}.so"
    return [folder / name for folder in library_store.folders()]


def loaded(libraries: list[Path]) -> ctypes.PyDLL | None:
    """The first library that is there, whole, and can be loaded, or None."""
    for library in libraries:
        with suppress(OSError):  # out of reach, writable for others, mounted without execution...
            found = library_store.loaded(library, ctypes.PyDLL)
            if found is not None:
                return found
    return None


def compiled(
    compiler: Compiler,
    command: list[str],
    libraries: list[Path],
    source: str = FASTPATH.source.name,
) -> ctypes.PyDLL:
    """The library, compiled into the first place that allows it.

    Raises:
        UnsupportedError: the compiler rejects the source, or no place can be written to.
    """

    def compile_(made: Path) -> None:
        said = compiler.failure([*command, "-o", str(made)], made.parent)
        if said is not None:
            raise unsupported(f"{source} to compile", said)

    failures = []
    for library in libraries:
        try:
            library_store.ensure(library, compile_, compiler.stopped.wait)
            found = library_store.loaded(library, ctypes.PyDLL)
            if found is not None:
                return found
            failures.append(f"{library.parent}: {STOPPED}")
        except OSError as error:  # read-only, full, mounted without execution...
            failures.append(f"{library.parent}: {error}")
    raise unsupported("a folder to keep the compiled library in", "; ".join(failures))


def _python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def unsupported(expected: str, received: str) -> UnsupportedError:
    """The fast path cannot be: why."""
    return UnsupportedError(
        "fastlinear.fastpath.lookup",
        expected,
        received,
        "Nothing is lost: calls take the way through Python instead.",
    )
