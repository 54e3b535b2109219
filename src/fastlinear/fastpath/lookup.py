"""The compiled fast path of the ops: plans looked up and run in one C++ call, where it can be
built.

It only shortens the way to a plan. Until it is there, and where it cannot be built, calls take the
lookup in their op's Python instead, which costs microseconds. A library compiled earlier is loaded
at the first plan; else a thread compiles it while calls go on. Each op has a table of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from fastlinear.fastpath import library
from fastlinear.fastpath.build import Build, after_fork, waited
from fastlinear.fastpath.build import is_compiling as is_compiling
from fastlinear.fastpath.build import patience as patience
from fastlinear.fastpath.build import settle as _settle

PATIENCE_S = 60.0  # most seconds to wait before something is timed


@dataclass(frozen=True)
class Table:
    """The functions of one op's plans.

    Attributes:
        call: (three leading arguments, the rest) → the result, or None where no plan is known for
            such a call. The leading ones are tensors, None, or lists or tuples of those, the others
            strings, booleans or None.
        admit: the same arguments and a plan: a callable of the leading arguments, or one of the
            tuples that ``plans.h`` describes. Whether such calls will be served.
        wants: the arguments of a call → whether it could be served, but for want of a plan.
        clear: forget all plans.
    """

    call: Callable[..., Any]
    admit: Callable[..., bool]
    wants: Callable[..., bool]
    clear: Callable[[], None]


class _Build(Build):
    """How far this process is with its fast path, and what it made of it."""

    def __init__(self) -> None:
        super().__init__(library.FASTPATH, _made, _tell)
        self.tables: dict[str, Table] = {}
        self.cuda: bool | None = None


_listeners: list[Callable[[], None]] = []


def table(op: str) -> Table | None:
    """The table of an op's plans if the fast path is there.

    The first call has it loaded or built; no call waits for that.
    """
    build = _build
    if not build.started:
        build.start()
    if build.loaded is None:
        return None
    if op not in build.tables:
        with build.lock:
            build.tables.setdefault(op, Table(*build.loaded.fastlinear_fastpath_table()))
    return build.tables[op]


def wait(timeout: float | None = None) -> bool:
    """Whether the fast path is there, waiting up to ``timeout`` seconds for it (None: as long as it
    takes).

    For what measures. False where the time was too short or the fast path cannot be built:
    ``reason_not`` tells the one from the other. Inside ``patience``, NotYetError is raised where
    that ends before it is there.
    """
    build = _build
    if not build.started:
        build.start()
    return waited(build, timeout)


def settle(timeout: float = PATIENCE_S) -> None:
    """Wait for builds that are under way, at most ``timeout`` seconds; starts none.

    What is timed while the compiler runs is neither with the fast path nor on a quiet machine.
    """
    _settle(timeout)


def reason_not() -> str | None:
    """Why there will be no fast path in this process, or None. Compiles nothing, waits for
    nothing."""
    return _build.reason_not()


def on_ready(listener: Callable[[], None]) -> None:
    """Call ``listener`` once the fast path can serve, so that plans made before are made known to
    it, or once it is known that it cannot.

    It may be called from another thread. A process forked while its parent was building has it
    called as well, to begin anew.
    """
    _listeners.append(listener)


def serves_cuda() -> bool:
    """Whether the fast path, which must be there, serves CUDA tensors; CUDA must be initialised."""
    build = _build
    if build.cuda is None:
        assert build.loaded is not None
        with build.lock:
            build.cuda = _cuda_handed_to(build.loaded)
    return build.cuda


def launcher(kernel: tuple[Any, ...]) -> Callable[..., bool]:
    """A kernel's tuple as a function of its tensors, which says whether it launched it.

    Only where ``serves_cuda``. The tensors' dtypes, shapes and alignment are the caller's to keep.
    """
    assert _build.loaded is not None
    assert _build.cuda
    made: Callable[..., bool] = _build.loaded.fastlinear_fastpath_launcher(kernel)
    return made


def ready() -> bool:
    """Whether the fast path is there; starts nothing."""
    return _build.loaded is not None


def _tell() -> None:
    for listener in _listeners:
        listener()


# --------------------------------------------------------------------------------------------
# What the library is told


def _made(loaded: ctypes.PyDLL) -> ctypes.PyDLL:
    pointer, thing = ctypes.c_void_p, ctypes.py_object
    loaded.fastlinear_fastpath_begin.argtypes = [thing, thing, ctypes.c_int64, thing, thing]
    loaded.fastlinear_fastpath_begin.restype = None
    loaded.fastlinear_fastpath_table.argtypes = []
    loaded.fastlinear_fastpath_table.restype = thing
    loaded.fastlinear_fastpath_launcher.argtypes = [thing]
    loaded.fastlinear_fastpath_launcher.restype = thing
    loaded.fastlinear_fastpath_cuda.argtypes = [thing, thing, pointer, pointer, pointer]
    loaded.fastlinear_fastpath_cuda.restype = ctypes.c_int
    mode = vars(forward_ad), "_current_level"
    loaded.fastlinear_fastpath_begin(torch.Tensor, torch.nn.Parameter, impl_offset(), *mode)
    return loaded


def impl_offset() -> int:
    """Where in a tensor object its TensorImpl's address lies, found in a live tensor."""
    t = torch.empty(0, device="cpu")
    word = ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_size_t * (torch.Tensor.__basicsize__ // word)).from_address(id(t))
    for i, value in enumerate(words):
        if value == t._cdata:
            return i * word
    raise library.unsupported("a tensor object that holds its TensorImpl's address", "none")


def driver_functions(*names: str) -> list[ctypes.c_void_p] | None:
    """Addresses of the CUDA driver's functions, or None where it is none or lacks one."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:  # what torch calls CUDA is another maker's
        return None
    if not all(hasattr(driver, name) for name in names):
        return None  # a driver older than CUDA 12
    return [ctypes.cast(getattr(driver, name), ctypes.c_void_p) for name in names]


def _cuda_handed_to(loaded: ctypes.PyDLL) -> bool:
    functions = driver_functions(
        "cuStreamIsCapturing", "cuLaunchKernelEx", "cuTensorMapReplaceAddress"
    )
    if functions is None:
        return False
    own = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    return bool(loaded.fastlinear_fastpath_cuda(*own, *functions))


# --------------------------------------------------------------------------------------------
# One a process

_build = _Build()


def _begin_anew() -> None:
    """In a forked child: the parent's thread is not here."""
    global _build
    if _build.under_way:
        _build = _Build()
        _tell()


after_fork(_begin_anew)
