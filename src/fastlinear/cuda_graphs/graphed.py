"""``fl.graphed``: a callable whose kernels are recorded once and replayed as one CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.calls import forward_mode, transforms_active
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.graphs import POWERS_OF_TWO, CudaRecorder, Recorder, checked_buckets
from fastlinear.cuda_graphs.arguments import flatten, flatten_call, named, rebuild
from fastlinear.cuda_graphs.cache import Graphs, recording
from fastlinear.cuda_graphs.options import Options
from fastlinear.cuda_graphs.watch import Watch

_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def graphed(
    target: Callable[..., Any],
    *,
    batch_dim: int | None = None,
    batch_buckets: Sequence[int] | None = None,
    max_graphs: int = 16,
    reuse_outputs: bool = False,
    by_address: Sequence[int | str] = (),
    watch: Sequence[Any] = (),
    on_unsupported: str = "error",
    warmup: int = 2,
) -> Graphed:
    """A callable that replays ``target`` as one CUDA graph, forward and backward.

    Args:
        target: a module, a method or a function of tensors on one CUDA device.
        batch_dim: the dimension that holds rows which ``target`` treats each alone. Calls are then
            padded to the next bucket; that padding changes no row is checked at each recording.
            None records every size as it comes.
        batch_buckets: row counts to record; by default 1, 2, 4 … 4096. More rows than the largest
            run plainly. Callables that draw random numbers are recorded at exact sizes.
        max_graphs: how many recordings to keep; the one not used for longest is freed first. A
            small one counts once though it is kept three times, for results in three places.
        reuse_outputs: without gradients, return outputs where the graph writes them, though
            earlier ones are held. Using one after the next call of its graph raises.
        by_address: arguments (positions or names) that are read and may be written where they
            are, such as a cache: no copy, one recording for each address.
        watch: modules and tensors ``target`` reads that cannot be found in its closure, attributes
            or globals.
        on_unsupported: ``"error"``, or ``"eager"`` to warn once and run ``target`` itself.
        warmup: how many runs go before each recording. Their side effects are put back.

    Returns:
        A :class:`Graphed`; call it as ``target``.

    Raises:
        InputError: an option is of the wrong kind or out of range; at a call, ``by_address`` names
            no argument of it, or none has dimension ``batch_dim``.
        UnsupportedError: at a call that no CUDA graph can hold; the message names the line.

    Outputs and gradients are those of ``target``, bit for bit where its kernels are. Without rows
    in the batch, while another graph is being recorded, inside ``torch.compile``, ``torch.func`` or
    forward-mode differentiation and under hooks on saved tensors (non-reentrant checkpoints have
    some) the call is ``target``'s own. Numbers and functions that the code reads by name, as
    attributes, globals or closure variables, are followed; other Python state (what lists and
    objects hold, what the callable sets itself) stays as it was recorded.

    >>> import torch, fastlinear as fl
    >>> layer = torch.nn.Linear(3, 4)
    >>> step = fl.graphed(layer, batch_dim=0)
    >>> if torch.cuda.is_available():
    ...     y = fl.graphed(layer.cuda(), batch_dim=0)(torch.ones(2, 3, device="cuda"))
    """
    _check_target(target)
    _check(
        on_unsupported in ("error", "eager"),
        "on_unsupported to be 'error' or 'eager'",
        f"on_unsupported={on_unsupported!r}",
        "'error' says why a call cannot be recorded, 'eager' runs it without a graph.",
    )
    _check(
        _is_whole(max_graphs, 1)
        and _is_whole(warmup, 1)
        and (batch_dim is None or _is_whole(batch_dim, 0)),
        "whole max_graphs and warmup of at least 1, batch_dim of at least 0 or None",
        f"{max_graphs=}, {warmup=}, {batch_dim=}",
        "The defaults serve most modules: leave them out.",
    )
    _check(
        batch_buckets is None or batch_dim is not None,
        "batch_dim beside batch_buckets",
        f"batch_dim=None, batch_buckets={batch_buckets!r}",
        "Name the dimension that holds the rows, usually batch_dim=0.",
    )
    _check(
        batch_buckets is None or isinstance(batch_buckets, Sequence),
        "batch_buckets to be a list of whole numbers above 0",
        f"{batch_buckets=}",
        f"Write batch_buckets=[{batch_buckets!r}].",
    )
    _check(
        isinstance(reuse_outputs, bool),
        "reuse_outputs to be True or False",
        f"{reuse_outputs=}",
        "True returns outputs where the graph writes them.",
    )
    _check(
        isinstance(by_address, tuple | list)
        and all(isinstance(a, str) or _is_whole(a, 0) for a in by_address),
        "by_address to be a tuple of positions, from 0, and names of arguments",
        f"{by_address=}",
        "For example by_address=('cache',).",
    )
    _check(
        isinstance(watch, tuple | list) and not any(map(_holds_nothing, watch)),
        "watch to be a list of modules and tensors",
        f"{watch=}",
        "Everything found in closures, attributes and globals is watched without it.",
    )
    buckets = POWERS_OF_TWO if batch_buckets is None else checked_buckets("graphed", batch_buckets)
    options = Options(
        batch_dim,
        buckets,
        max_graphs,
        reuse_outputs,
        named(target, by_address),
        on_unsupported == "eager",
        warmup,
    )
    return Graphed(target, options, Watch(target, watch), CudaRecorder())


def no_graph_here() -> bool:
    """Whether no call may be recorded or replayed in the state that this thread is in.

    Compilers, dispatch modes, transforms, forward-mode differentiation and hooks on saved tensors
    (checkpoints have some) need the operations themselves.
    """
    return (
        _is_compiling()
        or _dispatch_modes() > 0
        or transforms_active()
        or forward_mode()
        or _saved_hooks(True) is not None
        or recording()
    )


def _check_target(target: Any) -> None:
    usable = callable(target) and not isinstance(target, Graphed | type)
    _check(
        usable,
        "a module or function that is not graphed yet",
        f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__,
        "Give the module or function itself.",
    )


def _check(holds: bool, expected: str, received: str, remedy: str) -> None:
    if not holds:
        raise InputError("graphed", expected, received, remedy)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _holds_nothing(value: object) -> bool:
    """Whether no module or tensor can be found in it."""
    return not isinstance(value, Tensor | list | tuple | dict) and not callable(value)


class Graphed:
    """What :func:`graphed` returns. Attributes of the target are read through it.

    Attributes:
        target: the callable itself.
        counts: what its calls were so far.
    """

    def __init__(
        self, target: Callable[..., Any], options: Options, watch: Watch, recorder: Recorder
    ) -> None:
        self.target = target
        self._graphs = Graphs(target, options, watch, recorder)
        self.counts = self._graphs.counts
        self._busy = recorder.busy
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``target(*args, **kwargs)``, by replaying its graph."""
        if no_graph_here() or self._busy():
            return self._plainly(args, kwargs)
        with self._lock:
            plan = None if kwargs else self._graphs.again(args)
            tensors: Sequence[Tensor] = args
            if plan is None:
                tensors = []
                try:
                    spec = flatten_call(args, kwargs, tensors)
                except UnsupportedError as error:
                    self._graphs.refuse(error)
                else:
                    plan = self._graphs.plan(spec, tensors, args, kwargs)
            if plan is not None:
                self.counts.replayed += 1
                if plan.entry.backward is None:
                    return plan.infer(tensors)
                return plan.train(tensors, self._graphs.watch)
        return self._plainly(args, kwargs)

    def input_buffers(self, *args: Any) -> Any:
        """The buffers that the graph of such a call reads, in the structure of ``args``.

        Fill them in place and pass them: what already lies in a buffer is not copied. They are
        for calls of this shape without gradients, until the graph is freed.
        """
        tensors: list[Tensor] = []
        spec = flatten(args, tensors)
        with self._lock:
            plan = self._graphs.plan((spec, None), tensors, args, {})
        if plan is None:
            return args
        return rebuild(spec, iter(plan.buffers(tensors)))

    def clear(self) -> None:
        """Free every graph and its memory."""
        with self._lock:
            self._graphs.clear()

    def train(self, mode: bool = True) -> Graphed:
        """Switch the module to training, or not; returns this object."""
        self.target.train(mode)  # type: ignore[attr-defined]
        return self

    def eval(self) -> Graphed:
        """Switch the module to evaluation; returns this object."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "target" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.target, name)

    def __reduce__(self) -> Any:
        raise InputError(
            "graphed",
            "graphs to stay in the process that recorded them",
            "an attempt to copy or pickle a Graphed",
            "Copy its target and graph the copy.",
        )

    def __repr__(self) -> str:
        return f"Graphed({self.target!r}, graphs={len(self._graphs)})"

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.counts.plain += 1
        return self.target(*args, **kwargs)
