"""Tapes for the fast path's nodes, step by step: what ``tape.h`` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastlinear.ops.common.activations import CODES, activation
from fastlinear.ops.common.aten_steps import Number, composed
from fastlinear.ops.common.fastpath_launch import FastpathLaunch

Memory = tuple[int]
Memories = list[int]

SCALAR_TYPES = {
    torch.uint8: 0,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bfloat16: 15,
}
"""Numbers of c10::ScalarType."""


class Tape:
    """Steps over tensors known by their number: first those given, then those that steps make.

    Args:
        given: how many tensors there are before the first step.
    """

    def __init__(self, given: int) -> None:
        self._steps: list[tuple[Any, ...]] = []
        self._count = given
        self._masks = [0] * given
        self._kept: list[Any] = []
        self._spent: list[int] = []
        self._stream: int | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: int) -> int:
        """A new tensor, contiguous and uninitialised, on the device of ``like``."""
        return self._make("empty", SCALAR_TYPES[dtype], like, tuple(shape))

    def view(self, tensor: int, shape: Sequence[int]) -> int:
        """The tensor in another shape."""
        return self._make("view", tensor, tuple(shape))

    def strided(self, tensor: int, shape: Sequence[int], strides: Sequence[int]) -> int:
        """The tensor's memory, from its first element on, in that shape and those strides."""
        return self._make("strided", tensor, (*shape, *strides))

    def dense(self, tensor: int) -> int:
        """The tensor, copied unless it is contiguous."""
        return self._make("dense", tensor)

    def copy(self, into: int, tensor: int) -> None:
        """The tensor, broadcast, in the memory of ``into``, which a step made."""
        self._steps.append(("copy", into, tensor))

    def claim(self, given: int) -> int:
        """A given tensor as one that later steps write to, and the result.

        Python takes calls in which another given tensor lies in its memory.
        """
        self._steps.append(("claim", given))
        return given

    def spend(self, given: int) -> None:
        """Give a given tensor back after its last use, as those are that steps make.

        For tapes only that Python does not take over once they have begun.
        """
        self._spent.append(given)

    def multiply_add(self, into: int, a: int, b: int, c: int) -> None:
        """a + b * c by PyTorch, in the memory of ``into``."""
        self._steps.append(("addcmul", into, a, b, c))

    def launch(self, kernel: FastpathLaunch | None, *, anywhere: bool = False) -> bool:
        """A kernel's launch, whose tensors are numbers of this tape's; False for None.

        Given tensors must stay as aligned as they are, but for a kernel that reads them from
        ``anywhere``.
        """
        if kernel is None:
            return False
        self._steps.append(("kernel", kernel.kernel()))
        for _, tensor in kernel.tensors:
            if tensor < len(self._masks) and not anywhere:
                self._masks[tensor] = 15
        return True

    def linear(self, x: int, weight: int, bias: int | None) -> int:
        """x Wᵀ + b by PyTorch; x (M, K), weight (N, K)."""
        return self._make("linear", x, weight, -1 if bias is None else bias)

    def activate(self, name: str, pre: int, over: bool) -> int:
        """act(pre) by PyTorch, over pre's memory where PyTorch can and ``over`` allows it."""
        act = activation(name)
        return self._composed(act.in_place if over and act.in_place else act.value, pre)

    def differentiate(self, name: str, dy: int, saved: int) -> int:
        """dy * act'(pre) by PyTorch."""
        return self._composed(activation(name).backward, dy, saved)

    def product(self, a: int, b: int, *, a_turned: bool = False, b_turned: bool = False) -> int:
        """a b by PyTorch, either read transposed."""
        return self._make("mm", a, int(a_turned), b, int(b_turned))

    def accumulate(self, total: int, a: int, b: int) -> None:
        """total + a b by PyTorch, over the memory of total, which a step made."""
        self._steps.append(("addmm", total, a, b))

    def batched(self, a: int, b: int, *, into: int | None = None) -> int:
        """a b of matrices in batches by PyTorch; in the memory of ``into``, which a step made."""
        if into is None:
            return self._make("bmm", a, b)
        self._steps.append(("bmminto", into, a, b))
        return into

    def accumulate_batched(self, total: int, a: int, b: int) -> None:
        """total + a b of matrices in batches, over the memory of total, which a step made."""
        self._steps.append(("baddbmm", total, a, b))

    def row_sum(self, a: int, dims: Sequence[int] = (0,)) -> int:
        """a summed over its rows, or over these dimensions, by PyTorch."""
        return self._make("sum", a, tuple(dims))

    def onednn(
        self,
        x: int,
        weight: int,
        bias: int | None = None,
        *,
        x_turned: bool = False,
        weight_turned: bool = False,
    ) -> int:
        """x Wᵀ + b by oneDNN, either read transposed."""
        turned = int(x_turned), int(weight_turned)
        last = -1 if bias is None else bias
        return self._make("onednn", x, turned[0], weight, turned[1], last)

    def activate_in_cpp(
        self, name: str, pre: int, function: int, *, over: bool, bias: int | None = None
    ) -> int:
        """act(pre) by ``elementwise.cpp``'s function of that address; pre is contiguous.

        With a bias, contiguous as well, it is act(pre + bias) by the function that takes one, and
        pre holds that sum afterwards unless the result is written ``over`` it.
        """
        last = -1 if bias is None else bias
        if not over:
            return self._make("cact", pre, CODES[name], function, last)
        self._steps.append(("cact", pre, pre, CODES[name], function, last))
        return pre

    def differentiate_in_cpp(
        self, name: str, dy: int, saved: int, function: int, chunks: int, *, sums: bool
    ) -> tuple[int, int | None]:
        """(dpre, db or None) by ``elementwise.cpp``'s function of that address."""
        dpre = self._number()
        db = self._number() if sums else None
        last = -1 if db is None else db
        self._steps.append(("cdact", dpre, last, dy, saved, CODES[name], chunks, function))
        return dpre, db

    def call(self, function: int, *arguments: int | Memory | Memories, keeps: Any = None) -> None:
        """A C function of numbers and pointers, by its address.

        ``arguments`` are numbers, addresses among them, and the memory of tensors; ``keeps`` holds
        what the addresses are of. What it writes to was made ``empty`` before.
        """
        self._kept.append(keeps)
        self._steps.append(("call", function, arguments))

    def attempt(
        self, function: int, *arguments: int | Memory | Memories, keeps: Any = None
    ) -> None:
        """``call`` of a function whose int64 result is 0 where Python has to take the call."""
        self._kept.append(keeps)
        self._steps.append(("attempt", function, arguments))

    def only_at(self, tensor: int) -> None:
        """A given tensor's address is part of what the tape was made for."""
        self._masks[tensor] = -1

    def only_on(self, stream: int) -> None:
        """The tape may run on this raw stream only."""
        self._stream = stream

    def spec(self, *results: int | None) -> tuple[Any, ...]:
        """The tuple that ``tape.h`` describes; None stands for no result."""
        numbers = tuple(-1 if r is None else r for r in results)
        steps, masks, spent = tuple(self._steps), tuple(self._masks), tuple(self._spent)
        return (steps, numbers, masks, self._kept, self._stream, spent)

    def _composed(self, function: Callable[..., torch.Tensor], *tensors: int) -> int:
        """A function's ATen calls on these tensors."""
        calls, result = composed(function, len(tensors))
        numbers = list(tensors)
        for call in calls:
            name, _, overload = str(call.op._name).partition(".")
            arguments = tuple(
                numbers[a.number] if isinstance(a, Number) else (a,) for a in call.arguments
            )
            numbers.append(self._make("aten", name, overload, arguments))
        return numbers[result]

    def _number(self) -> int:
        self._count += 1
        return self._count - 1

    def _make(self, kind: str, *rest: Any) -> int:
        out = self._number()
        self._steps.append((kind, out, *rest))
        return out


def memory(tensor: int | None) -> Memory:
    """The address of a tensor's memory as an argument of ``call``; null for None."""
    return (-1 if tensor is None else tensor,)


def memories(tensors: Sequence[int | None]) -> Memories:
    """An array of such addresses."""
    return [-1 if t is None else t for t in tensors]
