"""The recorder: a run of a backend becomes a tape, which the compiled fast path runs from then on.

Nothing is computed meanwhile: launches, calls of compiled libraries and PyTorch's ops append
themselves, and their results are tensors of no memory, with a shape, strides and an address. So a
backend is written once, as Python. What it decides from those is decided for good; the fast path
asks for another tape where they differ.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastlinear.fastpath.aten_results import (
    Result,
    composed,
    contiguous,
    facts_of,
    is_composed,
    is_plain,
    is_view,
    result_of,
)
from fastlinear.fastpath.aten_steps import alone, bound
from fastlinear.fastpath.launch import FastpathLaunch
from fastlinear.fastpath.unboxed_steps import IN_PLACE, STEPS

SCALAR_TYPES = {
    torch.bool: 11,
    torch.uint8: 0,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bfloat16: 15,
}
"""Numbers of c10::ScalarType."""
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}
_PAGE = 1 << 12
ALIGNMENT = 15
"""Address bits that kernels are made for, unless they say otherwise."""
_EMPTY = frozenset(f"aten::{n}" for n in ("empty", "empty_like", "new_empty"))
_ZEROS = frozenset(f"aten::{n}" for n in ("zeros", "zeros_like", "new_zeros"))


class NotRecordable(Exception):
    """What a backend did has no steps; calls of the kind stay in Python."""


@dataclass
class _Memory:
    """Memory that tensors of the tape have: one that was given, or that a step makes.

    Attributes:
        number: the tensor whose memory kernels are given.
        dtype: its dtype.
        step: what makes it; None for one that was given.
        views: how a tensor with that memory lies → its number.
        dense: how many elements tensor ``number`` has where it is contiguous, else -1; None while
            nothing has asked how it lies.
        read: whether a step reads or writes it, besides the one that makes it.
    """

    number: int
    dtype: torch.dtype
    step: list[Any] | None = None
    views: dict[Any, int] = field(default_factory=dict)
    dense: int | None = None
    read: bool = False

    @classmethod
    def of(cls, number: int, t: Tensor, step: list[Any] | None = None) -> _Memory:
        """That of tensor ``number``, which lies as t does."""
        dense = t.numel() if t.is_contiguous() else -1
        return cls(number, t.dtype, step, {facts_of(t): number}, dense)


class Recording(TorchDispatchMode):
    """The steps of a function of tensors; see :func:`record`."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[list[Any]] = []
        self._count = len(given)
        self._masks = [0] * len(given)
        self._owners: list[Any] = []
        self._alive: list[Tensor] = []  # so that no storage's address is taken again
        self._memory: dict[int, _Memory] = {}
        self._free = _PAGE  # addresses of tensors that steps make are as aligned as theirs will be
        self._given = [None if t is None else self._as_given(i, t) for i, t in enumerate(given)]
        self._like = next(i for i, t in enumerate(given) if t is not None)
        self._written: set[int] = set()
        self._stream: int | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: skipping it imports all of it."""
        return False

    # ---------------------------------------------------------------------------------------
    # What backends call

    def launch(self, kernel: FastpathLaunch | None, masks: Sequence[int] | None = None) -> None:
        """A kernel's launch, whose tensors are numbers of :meth:`memory`; None has no steps.

        ``masks`` are the address bits of each tensor that must stay as they are; None for 15.
        """
        if kernel is None:
            raise NotRecordable("a launch that only Python makes")
        self.steps.append(["kernel", kernel.kernel()])
        needed = masks or [ALIGNMENT] * len(kernel.tensors)
        for (_, number), mask in zip(kernel.tensors, needed, strict=True):
            if number < len(self._masks):
                self._masks[number] |= mask

    def memory(self, t: Tensor) -> tuple[int, int]:
        """The number of the tensor whose memory t lies in, and how many bytes behind its first."""
        home = self.home(t)
        return home.number, int(t.storage_offset()) * t.element_size()

    def call(self, function: int, arguments: Iterable[Any], *, may_refuse: bool = False) -> None:
        """A C function by its address. Arguments are numbers, tensors for their memory, lists of
        tensors for an array of such, None for null, and objects of ctypes for theirs.

        One that ``may_refuse`` returns 0 where Python has to take the call.
        """
        given: list[Any] = []
        for argument in arguments:
            if argument is None:
                given.append((-1,))
            elif isinstance(argument, Tensor):
                given.append((self._start(argument),))
            elif isinstance(argument, list):
                given.append([-1 if t is None else self._start(t) for t in argument])
            elif isinstance(argument, int):
                given.append(argument)
            else:
                self._owners.append(argument)
                given.append(ctypes.addressof(argument))
        self.steps.append(["attempt" if may_refuse else "call", function, tuple(given)])

    def claim(self, t: Tensor) -> None:
        """A given tensor that a launch or a call will write to.

        Python takes calls in which another given tensor lies in its memory.
        """
        home = self.home(t)
        if home.step is None and home.number not in self._written:
            self._written.add(home.number)
            self.steps.append(["claim", home.number])

    def only_as_aligned(self, t: Tensor) -> None:
        """The tape serves only calls whose tensor is as aligned as t, where that was given."""
        number = self.home(t).number
        if number < len(self._masks):
            self._masks[number] |= ALIGNMENT

    def only_at(self, t: Tensor) -> None:
        """The tape serves only calls whose tensor, a given one, lies where t does."""
        number = self.home(t).number
        if number >= len(self._masks):
            raise NotRecordable("a launch made for an address of its own")
        self._masks[number] = -1

    def only_on(self, stream: int) -> None:
        """The tape may run on this raw stream only."""
        self._stream = stream

    # ---------------------------------------------------------------------------------------
    # What PyTorch calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = bound(func, args, kwargs)
        schema = func._schema
        written = [
            value
            for value, facts in zip(arguments, schema.arguments, strict=True)
            if facts.alias_info is not None and facts.alias_info.is_write and value is not None
        ]
        if written:
            return self._write(func, arguments, written)
        result = result_of(func, arguments)
        if result is not None:
            return self._make(func, arguments, result)
        if is_composed(func):
            with self:
                return composed(func, args, kwargs)
        if not is_view(func):
            raise NotRecordable(f"{schema.name}, of which it is not known what it returns")
        found = func(*args, **kwargs)  # no memory is read for it
        self._alive += [found] if isinstance(found, Tensor) else found
        return found

    def _make(self, func: Any, arguments: tuple[Any, ...], result: Result) -> Tensor:
        """A step that makes a tensor."""
        device = result.device
        if device is None:
            device = next(a.device for a in arguments if isinstance(a, Tensor))
        strides = contiguous(result.shape) if result.strides is None else result.strides
        made = self._nowhere(result.shape, strides, result.dtype, device)
        name = func._schema.name
        if name in _EMPTY:
            self._new(made)
        elif name in _ZEROS:
            memory = self._new(made)
            self.home(made)
            self.steps.append(["aten", self._number(), "aten::zero_", "", (memory,)])
        else:
            self._compute(func, arguments, made)
        return made

    def _write(self, func: Any, arguments: tuple[Any, ...], written: list[Tensor]) -> Tensor:
        if len(written) != 1 or len(func._schema.returns) != 1:
            raise NotRecordable(f"{func._schema.name} writes to more than one tensor")
        target = written[0]
        self.claim(target)
        special = IN_PLACE.get(str(func))
        if special is None or not special(self, arguments, target):
            self._compute(func, arguments, None)
        return target

    def _compute(self, func: Any, arguments: tuple[Any, ...], result: Tensor | None) -> None:
        """A step of an op of PyTorch, whose result, if any, is new memory."""
        special = STEPS.get(str(func))
        step = None if special is None or result is None else special(self, arguments)
        if step is None:
            name, _, overload = str(func._name).partition(".")
            step = ["aten", None, name, overload, tuple(map(self._boxed, arguments))]
        number = self._number()
        step[1] = number
        self.steps.append(step)
        if result is not None:
            home = self._memory[_key(result)] = _Memory.of(number, result, step)
            home.read = True  # by the op that makes it

    def _boxed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.at(value)
        if isinstance(value, torch.dtype):
            value = SCALAR_TYPES[value]
        elif isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        elif isinstance(value, list | tuple):
            if not all(isinstance(v, int | float) for v in value):
                raise NotRecordable("an argument that is a list of tensors")
            value = tuple(value)
        elif not isinstance(value, int | float | str | None):
            raise NotRecordable(f"an argument of type {type(value).__name__}")
        return (value,)

    # ---------------------------------------------------------------------------------------
    # Tensors

    def _as_given(self, number: int, t: Tensor) -> Tensor:
        """The tensor in a storage of its own, so that it is told from others in its memory."""
        kind = tuple(t.shape), t.stride(), t.dtype, t.device
        alias = self._nowhere(*kind, t.data_ptr())
        self._memory[_key(alias)] = _Memory.of(number, alias)
        return alias

    def _nowhere(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        address: int | None = None,
    ) -> Tensor:
        """A tensor of that kind whose memory is not to be touched."""
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        size = 0 if 0 in shape else (last + 1) * dtype.itemsize
        if address is None:
            address = self._free
            self._free += -(-size // _PAGE) * _PAGE + _PAGE
        storage = torch._C._construct_storage_from_data_pointer(address, device, size)
        made = torch.empty(0, dtype=dtype, device=device)
        made.set_(storage, 0, shape, strides)
        self._alive.append(made)
        return made

    def _number(self) -> int:
        self._count += 1
        return self._count - 1

    def _new(self, t: Tensor) -> int:
        """Memory that a step makes. How it lies is settled by who first asks for a tensor of it."""
        number = self._number()
        shape = (
            t.shape if t.is_contiguous() else (t.untyped_storage().nbytes() // t.element_size(),)
        )
        step = ["empty", number, SCALAR_TYPES[t.dtype], self._like, tuple(shape)]
        self.steps.append(step)
        self._memory[_key(t)] = _Memory(number, t.dtype, step)
        return number

    def home(self, t: Tensor) -> _Memory:
        found = self._memory.get(_key(t))
        if found is None:
            raise NotRecordable("a tensor that was neither given nor made")
        found.read = True
        return found

    def _start(self, t: Tensor) -> int:
        """The number of a tensor that begins where t does."""
        return self.home(t).number if t.storage_offset() == 0 else self.at(t)

    def at(self, t: Tensor) -> int:
        """The number of a tensor that lies as t does."""
        home = self.home(t)
        facts = facts_of(t)
        number = home.views.get(facts)
        if number is not None:
            return number
        whole = t.storage_offset() == 0 and is_plain(t)
        if t.dtype is not home.dtype:
            raise NotRecordable("memory read in two dtypes")
        if home.dense is None:
            assert home.step is not None
            home.dense = t.untyped_storage().nbytes() // t.element_size()
            if whole and t.numel() == home.dense:
                home.step[4] = tuple(t.shape)
                home.views[facts] = home.number
                return home.number
        number = self._number()
        if whole and home.dense == t.numel():
            self.steps.append(["view", number, home.number, tuple(t.shape)])
        else:
            offset = () if t.storage_offset() == 0 else (t.storage_offset(),)
            self.steps.append(["strided", number, home.number, (*t.shape, *t.stride(), *offset)])
        home.views[facts] = number
        return number

    def spec(self, results: Sequence[Tensor | None], spent: Sequence[int]) -> tuple[Any, ...]:
        """The tuple that ``tape.h`` describes."""
        for t in results:
            self._written_to(t)
        return self._spec(tuple(-1 if t is None else self.at(t) for t in results), spent)

    def lists(self, results: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """The pair that ``lists.h`` describes, whose pieces are the results."""
        for t in results:
            self._written_to(t)
        pieces = tuple(map(self.piece, results))
        numbers = dict.fromkeys(piece[0] for piece in pieces if piece is not None)
        return self._spec(tuple(numbers), ()), pieces

    def piece(self, t: Tensor | None) -> tuple[int, tuple[int, ...], int] | None:
        """A dense result: the number of the tensor whose memory it lies in, its shape, and how many
        elements lie before it."""
        if t is None:
            return None
        home = self.home(t)
        if home.step is None or not t.is_contiguous():
            raise NotRecordable("a piece that is not dense, or of a given tensor")
        return home.number, tuple(t.shape), int(t.storage_offset())

    def _written_to(self, t: Tensor | None) -> None:
        home = None if t is None else self._memory.get(_key(t))
        if home is not None and home.step is not None and not home.read:
            raise NotRecordable("a result that nothing writes to")

    def _spec(self, numbers: tuple[int, ...], spent: Sequence[int]) -> tuple[Any, ...]:
        steps = tuple(map(tuple, self.steps))
        return (steps, numbers, tuple(self._masks), self._owners, self._stream, tuple(spent))


_recording = threading.local()
_under_way = 0  # in all threads; most calls need look no further


def active() -> Recording | None:
    """The recording under way in this thread, if any."""
    return getattr(_recording, "now", None) if _under_way else None


def record(
    function: Callable[..., Sequence[Tensor | None]],
    given: Sequence[Tensor | None],
    spent: Sequence[int] = (),
    *,
    pieces: bool = False,
) -> tuple[Any, ...] | None:
    """A function of tensors as a tape, or None where something it does has no steps.

    It must have run on such tensors, so that kernels are compiled. Nothing runs now, and no memory
    is read, written or taken.

    Args:
        function: the given tensors → results, None among both.
        given: tensors laid out as those that the tape will be given.
        spent: numbers of given tensors that the tape may give back after their last use.
        pieces: whether results may share memory: what is made is then a tape and its pieces.
    """
    if any(t is not None and (t.is_neg() or t.is_conj()) for t in given):
        return None
    global _under_way
    with ExitStack() as stack:
        stack.enter_context(alone())
        stack.enter_context(torch.inference_mode())
        recording = Recording(given)
        before, _recording.now = active(), recording
        _under_way += 1
        try:
            with recording:
                results = function(*recording._given)
            return recording.lists(results) if pieces else recording.spec(results, spent)
        except NotRecordable:
            return None
        finally:
            _under_way -= 1
            _recording.now = before


def run(function: Any, *arguments: Any) -> Any:
    """Call a C function, or record the call.

    Arguments are numbers, tensors for their memory, lists of tensors for an array of such, None for
    null, and objects of ctypes for theirs.
    """
    if _under_way and (recording := active()) is not None:
        return recording.call(ctypes.cast(function, ctypes.c_void_p).value or 0, arguments)
    return function(*[a if type(a) is int else _passed(a) for a in arguments])


def attempt(function: Any, *arguments: Any) -> bool:
    """The same of a function that returns 0 where it does not serve: whether it did."""
    recording = active()
    if recording is None:
        return bool(function(*map(_passed, arguments)))
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    recording.call(address, arguments, may_refuse=True)
    return True


def claim(t: Tensor) -> None:
    """Say that what follows writes to a tensor of the caller's; where nothing records, nothing."""
    recording = active()
    if recording is not None:
        recording.claim(t)


def _passed(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if argument is None:
        return 0
    if isinstance(argument, list):
        addresses = [0 if t is None else t.data_ptr() for t in argument]
        return (ctypes.c_void_p * len(addresses))(*addresses)
    return argument


def _key(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
