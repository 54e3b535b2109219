"""Nodes of autograd in C++: training calls of the fast path whose forward and backward need no
Python.

A library beside the fast path's, built in the same way at the first training call; until it is
there, and where it cannot be, the families' formulas run in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.settings import kept_bytes
from fastlinear.dispatch.work import Work, host
from fastlinear.fastpath import library, lookup
from fastlinear.fastpath.build import Build, after_fork, waited

NOTHING, OUTPUT, HIDDEN, INTERNAL, SPENT = 0, 1, 2, 3, 4
"""What a forward keeps for its backward besides the call's tensors; as autograd_node.h numbers
it."""
KEPT = {"none": NOTHING, "output": OUTPUT, "pre": INTERNAL}
"""How what an activation's derivative reads is kept, by the activation's ``saved``."""
_IN_PYTHON = 1.66  # times as long as in C++: the mean of ``families/linear/README.md``'s table
MAX_TENSORS = 63
"""Most tensors of a call, whose gradients are counted as bits."""

_listeners: list[Callable[[], None]] = []


def node(
    name: str,
    tensors: Sequence[Tensor | None],
    forward: Callable[..., tuple[Tensor | None, ...]],
    backward: Callable[..., tuple[Tensor | None, ...]],
    recorder: Callable[..., Any] | None,
    tape: Any,
    kept: Sequence[int],
    readers: Sequence[int],
    kept_readers: Sequence[int] | None = None,
) -> Any:
    """A plan for the fast path; only once :func:`begun` or :func:`wait` says so.

    Args:
        name: of the node, ending in ``Backward``.
        tensors: those of a call of the kind, as the fast path sees them, None included.
        forward: (three leading arguments) → (y, each tensor it keeps or None), without gradients.
        backward: (dy, gradient of the hidden, shape of y, tensors, kept, needs) → a gradient or
            None for each of ``tensors``; dy may be of any strides, and None where the hidden one's
            gradient is not. Differentiable where gradients are enabled.
        recorder: (needs, dy, tensors, kept) → a tape for that backward, or None; asked after
            ``backward`` ran on these. Its tensors: dy, then those of the call, then the kept ones.
            Where any is ``SPENT``, both functions get one argument more: whether the memory of
            those is theirs to write over.
        tape: the forward's tape or None; its tensors are those of the call, its results y and
            each tensor that it keeps, none for the output itself.
        kept: ``OUTPUT``, ``HIDDEN`` (once at most), ``INTERNAL``, ``SPENT`` or ``NOTHING`` for
            each. ``SPENT`` is an ``INTERNAL`` that a graph's last backward may write over, where
            nobody else holds it.
        readers: for each tensor the gradients, as bits, whose backward reads it.
        kept_readers: the same for each of ``kept``; all where None.
    """
    if SPENT in kept and any(t is not None and t.is_cuda for t in tensors):
        serves_cuda()  # to know where a CUDA graph records a backward
    whom = tuple(readers), (-1,) * len(kept) if kept_readers is None else tuple(kept_readers)
    spec = ("node", name, forward, backward, recorder, tape, tuple(kept), *whom)
    return _loaded_for(tensors).fastlinear_node_plan(spec, tuple(tensors))


def tape(spec: Any, tensors: Sequence[Tensor | None], fallback: Callable[..., Any]) -> Any:
    """A plan for the fast path for calls without gradients; only once :func:`begun` says so.

    Args:
        spec: a tape's; its tensors are those of the call. One result is returned as it is, several
            as a tuple, with None for one that is missing.
        tensors: those of a call of the kind, as the fast path sees them, None included.
        fallback: (three leading arguments) → the same, for otherwise aligned tensors.
    """
    return _loaded_for(tensors).fastlinear_node_tape(spec, tuple(tensors), fallback)


def lists(
    name: str,
    results: int,
    tensors: Sequence[Tensor | None],
    forward: Callable[..., tuple[list[Tensor], Tensor | None]],
    backward: Callable[..., tuple[Tensor | None, ...]] | None,
    recorder: Callable[..., Any] | None,
    tape: Any,
    keeps: int,
) -> Any:
    """A plan for the fast path for calls of lists, which return one; only once :func:`begun` says
    so.

    A tape here is a pair: of a tape's tuple, and of pieces of its tensors, (number, shape,
    numbers before it) or None each. Its tensors are dense.

    Args:
        name: of the node, ending in ``Backward``.
        results: how many.
        tensors: those of a call of the kind, as the fast path sees them, None included.
        forward: (three leading arguments) → (results, a tensor it keeps or None), without
            gradients.
        backward: (gradient of each result, tensors, kept, needs) → a gradient or None for each of
            ``tensors``; differentiable where gradients are enabled. None for calls without
            gradients. It gets None for the gradient of a result that is not used, for all of that
            result's group, and for tensors that no wanted gradient reads.
        recorder: (needs, gradients, tensors, kept) → a tape for that backward, or None; asked
            after ``backward`` ran on these, for up to four kinds of strides. Its tensors: in that
            order, gradients first, whose rows are dense and at one distance; its pieces are the
            gradients of ``tensors``.
        tape: the forward's or None; its pieces are the results and what it keeps.
        keeps: ``NOTHING``, ``OUTPUT`` for all results, or ``INTERNAL`` for a tensor of its own.
    """
    spec = ("lists", name, results, forward, backward, recorder, tape, keeps)
    return _loaded_for(tensors).fastlinear_node_lists(spec, tuple(tensors))


def begun() -> bool:
    """Whether nodes can be made by now; the first call has the library loaded or built."""
    build = _build
    if not build.started:
        build.start()
    return build.loaded is not None


def wait(timeout: float | None = None) -> bool:
    """Whether the library is there, waiting up to ``timeout`` seconds for it."""
    build = _build
    if not build.started:
        build.start()
    return waited(build, timeout)


def reason_not() -> str | None:
    """Why there will be no such nodes in this process, or None. Compiles and waits for nothing."""
    return _build.reason_not()


def node_work(family: str) -> Work:
    """What the host pays for a node, for its price: in Python it takes longer."""
    return host(f"{family} node", 1.0 if reason_not() is None else _IN_PYTHON)


def serves_cuda() -> bool:
    """Whether its tapes launch kernels; CUDA must be initialised and the library be there."""
    build = _build
    if build.cuda is None:
        assert build.loaded is not None
        functions = lookup.driver_functions(
            "cuStreamIsCapturing", "cuLaunchKernelEx", "cuTensorMapReplaceAddress"
        )
        build.cuda = functions is not None and bool(build.loaded.fastlinear_node_cuda(*functions))
    return build.cuda


def empty(shape: tuple[int, ...], scalar_type: int) -> Tensor:
    """A new tensor on the CPU as tapes make them; only once :func:`begun` says so."""
    assert _build.loaded is not None
    made: Tensor = _build.loaded.fastlinear_node_empty(shape, scalar_type)
    return made


def known_layer(known: Tensor, derivative: Any, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
    """``op.differentiable.known_layer`` by a node; only once :func:`begun` says so."""
    assert _build.loaded is not None
    made: Tensor = _build.loaded.fastlinear_node_known(known, derivative, x, weight, bias)
    return made


def release_kept() -> int:
    """Give back memory that is kept for large results on the CPU; how many bytes."""
    loaded = _build.loaded
    if loaded is None:
        return 0
    return int(loaded.fastlinear_node_release())


def on_ready(listener: Callable[[], None]) -> None:
    """Call ``listener``, maybe from another thread, once nodes can be made, or cannot be."""
    _listeners.append(listener)


class _Build(Build):
    """How far this process is with its library of nodes."""

    def __init__(self) -> None:
        super().__init__(library.NODE, _made, _tell)
        self.cuda: bool | None = None
        self.malloc_keeps = False


def _loaded_for(tensors: Sequence[Tensor | None]) -> ctypes.PyDLL:
    """The library, for a plan of such calls. From the first one of the CPU on malloc keeps what
    results free."""
    build = _build
    assert build.loaded is not None
    if not build.malloc_keeps and any(t is not None and t.device.type == "cpu" for t in tensors):
        build.malloc_keeps = True
        build.loaded.fastlinear_node_malloc(kept_bytes())
    return build.loaded


def _tell() -> None:
    for listener in _listeners:
        listener()


def _made(loaded: ctypes.PyDLL) -> ctypes.PyDLL:
    pointer, thing = ctypes.c_void_p, ctypes.py_object
    loaded.fastlinear_node_begin.argtypes = [thing, thing, ctypes.c_int64]
    loaded.fastlinear_node_begin.restype = None
    loaded.fastlinear_node_cuda.argtypes = [pointer, pointer, pointer]
    loaded.fastlinear_node_cuda.restype = ctypes.c_int
    loaded.fastlinear_node_plan.argtypes = [thing, thing]
    loaded.fastlinear_node_plan.restype = thing
    loaded.fastlinear_node_lists.argtypes = [thing, thing]
    loaded.fastlinear_node_lists.restype = thing
    loaded.fastlinear_node_tape.argtypes = [thing, thing, thing]
    loaded.fastlinear_node_tape.restype = thing
    loaded.fastlinear_node_empty.argtypes = [thing, ctypes.c_int64]
    loaded.fastlinear_node_empty.restype = thing
    loaded.fastlinear_node_known.argtypes = [thing] * 5
    loaded.fastlinear_node_known.restype = thing
    loaded.fastlinear_node_keep.argtypes = [ctypes.c_int64]
    loaded.fastlinear_node_keep.restype = None
    loaded.fastlinear_node_malloc.argtypes = [ctypes.c_int64]
    loaded.fastlinear_node_malloc.restype = None
    loaded.fastlinear_node_release.argtypes = []
    loaded.fastlinear_node_release.restype = ctypes.c_int64
    loaded.fastlinear_node_keep(kept_bytes())
    loaded.fastlinear_node_begin(torch.Tensor, torch.nn.Parameter, lookup.impl_offset())
    return loaded


_build = _Build()


def _begin_anew() -> None:
    """In a forked child: the parent's thread is not here."""
    global _build
    if _build.under_way:
        _build = _Build()
        _tell()


after_fork(_begin_anew)
