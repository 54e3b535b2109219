"""Compositions of PyTorch's ops as lists of ATen calls: what an activation runs, and costs.

The compiled fast path replays such a list, and rules of ``optimize_`` compare calls with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fastlinear.activations.reference import ACTIVATIONS, activation
from fastlinear.core.fork_lock import ForkLock

_FREE = frozenset({"aten::detach", "aten::alias", "aten::view"})  # no pass over memory
# Held while a mode is on. PyTorch's flag that one is on belongs to the process: of two threads that
# enter and leave in turns, the last to leave would leave it set.
_recording = ForkLock()


@dataclass(frozen=True)
class Number:
    """A tensor among the arguments: one given, or the result of an earlier call."""

    number: int


@dataclass(frozen=True)
class Call:
    """One call of an ATen op.

    Attributes:
        op: the overload.
        arguments: all of the schema's, in its order; tensors by their number.
    """

    op: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """As ``aten::add``, in place or not."""
        return plain_name(self.op)

    @property
    def constants(self) -> tuple[Any, ...]:
        """The arguments that are no tensors."""
        return tuple(a for a in self.arguments if not isinstance(a, Number))

    @property
    def tensors(self) -> tuple[int, ...]:
        """The numbers of those that are."""
        return tuple(a.number for a in self.arguments if isinstance(a, Number))


def plain_name(op: Any) -> str:
    """An overload's name without that of the overload, and without ``_`` for in place."""
    return str(op._schema.name).rstrip("_")


class Recorder(TorchDispatchMode):
    """While on, keeps each ATen call; tensors are numbered, those given first."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.tensors = list(given)  # alive, so that no id is taken again
        self._numbers = {id(t): i for i, t in enumerate(given)}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: skipping it imports all of it."""
        return False

    def number(self, tensor: Tensor) -> int:
        """A tensor's number; of one that is new, the next."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = tuple(map(self._argument, bound(func, args, kwargs)))
        result = func(*args, **kwargs)
        self.calls.append(Call(func, arguments))
        if isinstance(result, Tensor):
            # in place: the tensor has a new number from here on
            self._numbers[id(result)] = len(self.tensors)
            self.tensors.append(result)
        return result

    def _argument(self, value: Any) -> Any:
        return Number(self.number(value)) if isinstance(value, Tensor) else value


@contextmanager
def alone() -> Iterator[None]:
    """No other mode is on in this thread, and no other thread records."""
    with _recording, _disable_current_modes(), torch.inference_mode(False):
        yield


def bound(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of the op's schema, defaults included."""
    given = iter(args)
    found = []
    for argument in op._schema.arguments:
        default = kwargs.get(argument.name, argument.default_value)
        found.append(default if argument.kwarg_only else next(given, default))
    return tuple(found)


@cache
def composed(function: Callable[..., Tensor], count: int) -> tuple[tuple[Call, ...], int]:
    """The ATen calls of a function of ``count`` tensors, each with one result, and the result's
    number: numbers from ``count`` on are the results of the calls in order."""
    with alone(), torch.no_grad():
        given = [torch.zeros(2, device="cpu", dtype=torch.float32) for _ in range(count)]
        with torch.autocast("cpu", enabled=False), Recorder(*given) as recorder:
            result = recorder.number(function(*given))
    return tuple(recorder.calls), result


def name_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """The activation that one call of an ATen op computes, or None."""
    known = _single().get(plain_name(op))
    if known is None:
        return None
    return known.get(tuple(a for a in bound(op, args, kwargs) if not isinstance(a, Tensor)))


def is_near(call: Call) -> bool:
    """Whether another call of the op, with other constants, is an activation."""
    return call.name in _single() and call.constants not in _single()[call.name]


@cache
def op_names() -> frozenset[str]:
    """Names of the ops that activations are, such as ``relu``."""
    return frozenset(name.removeprefix("aten::") for name in _single())


@cache
def _single() -> dict[str, dict[tuple[Any, ...], str]]:
    """Name of an op → its constants → activation, of those that are one op."""
    found: dict[str, dict[tuple[Any, ...], str]] = {}
    for name, act in ACTIVATIONS.items():
        calls, _ = composed(act.value, 1)
        if len(calls) == 1:
            found.setdefault(calls[0].name, {})[calls[0].constants] = name
    return found


# --------------------------------------------------------------------------------------------
# What PyTorch's autograd moves and keeps


@cache
def moved(name: str) -> tuple[int, int]:
    """Numbers that PyTorch reads and writes for each number of a result: by the activation, and by
    its gradient."""
    forward, backward, _ = _differentiated(name)
    return forward, backward


@cache
def kept(name: str) -> frozenset[str]:
    """What PyTorch's autograd keeps of an activation: ``"pre"``, ``"output"``, or ``"its <op>"``
    for the result of an op on the way."""
    return _differentiated(name)[2]


@cache
def _differentiated(name: str) -> tuple[int, int, frozenset[str]]:
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with alone(), torch.enable_grad():
        pre = torch.zeros(2, device="cpu", dtype=torch.float32, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with torch.autocast("cpu", enabled=False):
            with Recorder(pre) as forward, hooks:
                y = activation(name).value(pre)
            dy = torch.ones_like(y)
            with Recorder(dy) as backward:
                torch.autograd.grad(y, pre, dy)
    names = {pre.data_ptr(): "pre"}
    for call, tensor in zip(forward.calls, forward.tensors[1:], strict=False):
        names.setdefault(tensor.data_ptr(), f"its {call.name.removeprefix('aten::')}")
    if y is not pre:
        names[y.data_ptr()] = "output"
    found = frozenset(names[t.data_ptr()] for t in saved if t.numel() == pre.numel())
    return _passes(forward.calls), _passes(backward.calls), found


def _passes(calls: Sequence[Call]) -> int:
    return sum(len(c.tensors) + 1 for c in calls if c.name not in _FREE)
