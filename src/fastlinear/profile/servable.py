"""What cannot be profiled or rewritten as it is: told by name before anything runs or is saved.

A model that communicates is refused, because processes measure by their own clocks, would run
different numbers of steps and wait for each other for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastlinear.core.calls import forward_mode, transforms_active
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.wrappers import PLAIN, distributed_wrapper, foreign_kind, inner_tensors

_FIRST = (
    "Optimize the plain model first, and wrap or shard it afterwards: optimize_ on one process, "
    "result.save(path), then fl.apply_(model, path) on every process."
)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_dispatch_modes = torch._C._len_torch_dispatch_stack


def check_servable(model: nn.Module, function: str) -> None:
    """Raise unless every part of the model runs in this process on values of its own.

    Raises:
        UnsupportedError: a part is wrapped or sharded (DDP, FSDP, tensor parallelism), holds a
            tensor subclass whose memory cannot be told, or a dispatch mode or a transform of
            ``torch.func`` is active.
        InputError: a parameter or buffer has no values.
    """
    if _dispatch_modes():
        active = type(torch._C._get_dispatch_stack_at(_dispatch_modes() - 1)).__name__
        _refuse(
            function,
            "no dispatch mode, under which steps are neither real nor timed",
            f"a call under {active}",
            "Leave its context first.",
        )
    if transforms_active() or forward_mode():
        _refuse(
            function,
            "no transform of torch.func and no forward-mode differentiation around the call",
            "a call under one",
            "Call it outside, with plain tensors.",
        )
    for name, module in model.named_modules():
        why = distributed_wrapper(module)
        if why is not None:
            _refuse(
                function,
                "a model that runs within one process",
                f"{_called(name, module)}: {why}",
                _FIRST,
            )
    check_tensors((*model.named_parameters(), *model.named_buffers()), function)


def check_tensors(named: Iterable[tuple[str, Any]], function: str) -> None:
    """The same for tensors by name; what is no tensor is passed by."""
    for name, t in named:
        if not isinstance(t, Tensor):
            continue
        why = foreign_kind(t)
        if why is not None:
            _refuse(function, "tensors with all their values here", f"{name!r}, {why}", _FIRST)
        if any(part.is_meta for part in (t, *inner_tensors(t))):
            raise InputError(
                function,
                "a model and inputs with values",
                f"{name!r}, a tensor on the meta device",
                "Give it storage first, for example model.to_empty(device='cpu').",
            )
        if memory_of(t) is None:
            _refuse(
                function,
                "tensors whose memory can be saved and put back",
                f"{name!r}, a {type(t).__qualname__}",
                "Optimize the model before its weights are replaced by these.",
            )
        if any(is_freed(part) for part in memory_of(t) or ()):
            _refuse(
                function,
                "parameters with their values in memory",
                f"{name!r}, whose memory is freed or lies elsewhere",
                "Gather the parameters first, or optimize the model before it is sharded.",
            )


def memory_of(t: Tensor) -> list[Tensor] | None:
    """The plain strided tensors that hold this one's values; None where that cannot be told.

    Empty for sparse and nested tensors, which a forward does not write in place.
    """
    parts = [p for p in inner_tensors(t) if type(p) in PLAIN]
    if parts:
        return [p for p in parts if p.layout is torch.strided]
    if t.layout is not torch.strided:
        return []
    if type(t) in PLAIN:
        return [t]
    with torch._C.DisableTorchFunctionSubclass():  # a Parameter with methods of its own, say
        seen = t.detach()
    return [seen] if type(seen) is Tensor else None


def is_freed(t: Tensor) -> bool:
    """Whether the storage is smaller than what the tensor spans: FSDP1 resizes its own to 0."""
    if not t.numel() or t.layout is not torch.strided or t.is_nested:
        return False
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    needed = (t.storage_offset() + span) * t.element_size()
    return t.untyped_storage().nbytes() < needed


@contextmanager
def without_collectives(function: str) -> Iterator[None]:
    """Inside it, the first step of a model must not communicate, where other processes could.

    Raises UnsupportedError in place of the first collective, which does not run.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    if distributed.get_world_size() == 1:
        yield
        return
    with _Collectives(function):
        yield


class _Collectives(TorchDispatchMode):
    def __init__(self, function: str) -> None:
        super().__init__()
        self._function = function

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            _refuse(
                self._function,
                "a model that runs within one process",
                f"one whose step communicates ({func})",
                _FIRST,
            )
        return func(*args, **(kwargs or {}))


def _called(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else type(module).__name__


def _refuse(function: str, expected: str, received: str, remedy: str) -> NoReturn:
    raise UnsupportedError(function, expected, received, remedy)
