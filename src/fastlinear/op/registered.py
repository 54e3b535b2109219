"""The registered ops of a family, for ``torch.compile`` and export: made from its ``OpSpec``.

Two ops: the forward, which also gives what the backward reads besides operands and result, and the
backward, which has a gradient for every operand, empty where none is wanted. ``library`` declares
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.core import calls
from fastlinear.dispatch import cache
from fastlinear.dispatch.select import Choice
from fastlinear.op import blas, library
from fastlinear.op.front import check_invariant, choices
from fastlinear.op.repeated import Operands, Repeated, Results, flat, lengths, nested
from fastlinear.op.spec import Arguments, OpSpec, first, kind, leaves

Chosen = tuple[Choice, ...] | None
"""The backend of each piece; None for a call of empty tensors, which PyTorch's own ops compute."""
Shape = Sequence[Any]


def _saves_nothing(_: Arguments) -> Sequence[Shape]:
    return []


def _reads_no_result(_: Arguments) -> bool:
    return False


@dataclass(frozen=True)
class Traced:
    """What registered ops need to know of a family besides its ``OpSpec``.

    Attributes:
        shape: arguments → the shape of the result; sizes may be symbolic.
        forward: (arguments, backends, whether to save) → (result, the tensors saved).
        backward: (gradient of the result, the tensors saved and the result where it is read,
            arguments, backends, an operand's need of a gradient for each) → the gradients or None.
        arguments: (operands and options of the op, the forced backend) → the call; by default the
            op has the operands and options of the ``OpSpec``.
        saved: arguments → the shapes of what the forward saves.
        reads_result: arguments → whether the backward reads the result.
        saved_again: arguments → what the forward saves, where the call was traced without
            gradients.
        passed_on: the operand whose gradient is that of the result.
        summed: the operand whose gradient is that of the result summed over rows. Where it is the
            only one wanted, nothing is saved.
    """

    shape: Callable[[Arguments], Shape]
    forward: Callable[[Arguments, Chosen, bool], tuple[Tensor, Sequence[Tensor]]]
    backward: Callable[..., Sequence[Tensor | None]]
    arguments: Callable[[Sequence[Any], str | None], Arguments] | None = None
    saved: Callable[[Arguments], Sequence[Shape]] = _saves_nothing
    reads_result: Callable[[Arguments], bool] = _reads_no_result
    saved_again: Callable[[Arguments], Sequence[Tensor]] | None = None
    passed_on: str | None = None
    summed: str | None = None


def chosen_or(chosen: Chosen, piece: int, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the backend chosen for a piece, or the other where none was chosen."""
    return otherwise if chosen is None else chosen[piece].load()


def register(spec: OpSpec, traced: Traced) -> None:
    """Give the declared ops ``spec.name`` and ``spec.name + "_backward"`` their functions."""
    ops = _Ops(spec, traced)
    library.register_op(
        spec.name,
        implementation=ops.forward,
        fake=ops.forward_fake,
        backward=ops.formula,
        setup_context=ops.setup_context,
    )
    library.register_op(
        f"{spec.name}_backward", implementation=ops.backward, fake=ops.backward_fake
    )


class _Ops:
    def __init__(self, spec: OpSpec, traced: Traced) -> None:
        self._spec, self._traced = spec, traced
        self._known: dict[Any, tuple[Choice, ...]] = {}
        cache.on_change(self._known.clear)
        schema = getattr(torch.ops.fastlinear, spec.name).default._schema
        names = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
        self._count = len(names)
        self._passed_on = names.index(traced.passed_on) if traced.passed_on else None
        self._summed = names.index(traced.summed) if traced.summed else None
        self._results = [str(result.type) for result in schema.returns[1:]]
        self._forwards = Repeated(f"{spec.name}, registered", self._forward)
        self._backwards = Repeated(f"{spec.name}_backward, registered", self._backward)

    def forward(self, *given: Any) -> Any:
        """(operands, options, whether gradients are wanted, backend or ``""``) → y, saved."""
        found: Any = self._forwards(given[: self._count], given[self._count :])
        y, *saved = (found,) if isinstance(found, Tensor) else found
        return self._returned(y, saved)

    def _forward(self, operands: Operands, options: Sequence[Any]) -> Results:
        call, needs_grad = self._call((*operands, *options[:-2]), options[-1]), options[-2]
        saves = needs_grad and bool(self._traced.saved(call))
        y, saved = self._traced.forward(call, self._chosen(call, needs_grad), saves)
        y = _as_compiled(y)
        y = calls.as_result(y, y.shape)
        return (y, *map(_as_compiled, saved)) if saves else y

    def forward_fake(self, *given: Any) -> Any:
        call, needs_grad = self._call(given[:-2], given[-1]), given[-2]
        y = given[0].new_empty(self._traced.shape(call))
        shapes = self._traced.saved(call) if needs_grad else []
        return self._returned(y, [y.new_empty(shape) for shape in shapes])

    def _returned(self, y: Tensor, saved: list[Tensor]) -> Any:
        """As the schema has it: a list, or one result each, empty where nothing is saved."""
        if not self._results:
            return y
        if "List" in self._results[0]:
            return y, saved
        return (y, *saved, *(y.new_empty(0) for _ in range(len(self._results) - len(saved))))

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call, needs_grad = self._call(inputs[:-2], inputs[-1]), inputs[-2]
        y, *saved = flat(output) if self._results else [output]
        ctx.mark_non_differentiable(*saved)
        count = len(self._traced.saved(call))
        ctx.complete = needs_grad or not count
        saved = saved[:count] if needs_grad else []
        operands = inputs[: self._count]
        wanted = ctx.needs_input_grad[: self._count]
        if self._needs_sum_alone(wanted):
            operands, saved = (None,) * self._count, []
        elif ctx.complete and self._traced.reads_result(call):
            saved.append(y)
        ctx.lengths = lengths(operands)
        ctx.save_for_backward(*flat(operands), *saved)
        ctx.options = inputs[self._count : -2]
        ctx.backend = inputs[-1]

    def formula(self, ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[: self._count]
        found: list[Any] = [None] * self._count
        if self._passed_on is not None and wanted[self._passed_on]:
            found[self._passed_on] = dy
        if self._summed is not None and self._needs_sum_alone(wanted):
            found[self._summed] = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1]).sum(0)
        elif any(_any(need) for i, need in enumerate(wanted) if i != self._passed_on):
            tensors = iter(ctx.saved_tensors)
            operands = nested(tensors, ctx.lengths)
            found = self._gradients(ctx, dy, operands, list(tensors), found)
        return (*found, *(None for _ in ctx.options), None, None)

    def _gradients(
        self, ctx: Any, dy: Tensor, operands: list[Any], saved: list[Any], found: list[Any]
    ) -> list[Any]:
        if not ctx.complete:  # the caller asked for no gradients when it was traced
            call = self._call((*operands, *ctx.options), ctx.backend)
            assert self._traced.saved_again is not None
            saved = list(self._traced.saved_again(call))
        needs: list[bool] = []
        for i, (given, need) in enumerate(zip(operands, ctx.needs_input_grad, strict=False)):
            if isinstance(given, list):
                needs += need if isinstance(need, (list, tuple)) else [bool(need)] * len(given)
            else:
                needs.append(bool(need) and given is not None and i != self._passed_on)
        call = dy, saved, *operands, *ctx.options, needs, ctx.backend
        grads = library.call(f"{self._spec.name}_backward", *call)
        asked = iter([g if need else None for g, need in zip(grads, needs, strict=True)])
        own = nested(asked, ctx.lengths)
        return [mine if mine is not None else given for mine, given in zip(own, found, strict=True)]

    def _needs_sum_alone(self, wanted: Sequence[Any]) -> bool:
        others = (_any(need) for i, need in enumerate(wanted) if i != self._summed)
        return self._summed is not None and not any(others)

    def backward(self, dy: Tensor, saved: list[Tensor], *given: Any) -> list[Tensor]:
        """(dy, saved, operands, options, needs, backend) → a gradient or nothing each."""
        operands, options = given[: self._count], given[self._count :]
        found = self._backwards((dy, saved, *operands), options)
        return [dy.new_empty(0) if g is None else g for g in found]

    def _backward(self, given: Operands, options: Sequence[Any]) -> Results:
        dy, saved, *operands = given
        call, needs = self._call((*operands, *options[:-2]), options[-1]), tuple(options[-2])
        grads = self._traced.backward(dy, saved, call, self._chosen(call, True), needs)
        return tuple([None if g is None else _as_compiled(g) for g in grads])

    def backward_fake(self, dy: Tensor, _: list[Tensor], *given: Any) -> list[Tensor]:
        return [
            dy.new_empty(t.shape, dtype=t.dtype) if need and t is not None else dy.new_empty(0)
            for t, need in zip(flat(given[: self._count]), given[-2], strict=True)
        ]

    def _call(self, given: Sequence[Any], backend: str) -> Arguments:
        """What the op was given, in the structure of the spec."""
        if self._traced.arguments is not None:
            return self._traced.arguments(given, backend or None)
        held = iter(given)
        nested = tuple(
            next(held) if isinstance(group, str) else tuple(next(held) for _ in group)
            for group in self._spec.operands
        )
        return (*nested, *held, backend or None)

    def _chosen(self, call: Arguments, grad: bool) -> Chosen:
        """Once a kind of call; what is forced and cannot serve is refused of empty tensors too."""
        check_invariant(self._spec, call)
        empty = not all(t.numel() for t in leaves(call) if t is not None)
        if empty and call[-1] is None:
            return None
        key = (*kind(call), grad)
        if first(call).is_cuda:  # in each thread: a backward's is another
            blas.make_ready(first(call).device)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._spec.most_plans:
                self._known.clear()
            began = cache.changes()
            found = choices(self._spec, call, grad)
            if cache.changes() == began:
                self._known[key] = found
        return None if empty else found


def _as_compiled(t: Tensor) -> Tensor:
    """A result as compiled code takes it: dense, and behind a multiple of 16 bytes of memory."""
    t = t.contiguous()
    return t.clone() if t.storage_offset() * t.itemsize % 16 else t


def _any(need: Any) -> bool:
    return any(need) if isinstance(need, (list, tuple)) else bool(need)
