"""The registered ops of a family, for ``torch.compile`` and export: made from its ``OpSpec``.

Two ops: the forward, whose second result is what the backward reads besides the operands, and the
backward, which has a gradient for every operand, empty where none is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastlinear.dispatch.select import Choice
from fastlinear.op import library
from fastlinear.op.compile import Backends
from fastlinear.op.library import register_op
from fastlinear.op.spec import Arguments, OpSpec, leaves

Chosen = tuple[Choice, ...] | None
"""The backend of each piece; None for a call of empty tensors, which PyTorch's own ops compute."""


def _saves_nothing(_: Arguments) -> str:
    return "none"


def _no_shape(_: Arguments) -> Sequence[Any]:
    return (0,)


@dataclass(frozen=True)
class Traced:
    """What registered ops need to know of a family besides its ``OpSpec``.

    Attributes:
        shape: arguments → the shape of the result; sizes may be symbolic.
        forward: (arguments, backends, whether to keep the pre-activation) → (result, it or None).
        backward: (gradient of the result, what was saved or None, arguments, backends, an operand's
            need of a gradient for each) → the gradients or None.
        saved: arguments → what the backward reads: ``"none"``, ``"output"`` or ``"pre"``.
        saved_shape: arguments → the shape of the pre-activation.
        saved_again: arguments → the pre-activation, where the call was traced without gradients.
        passed_on: the operand whose gradient is that of the result.
    """

    shape: Callable[[Arguments], Sequence[Any]]
    forward: Callable[[Arguments, Chosen, bool], tuple[Tensor, Tensor | None]]
    backward: Callable[..., Sequence[Tensor | None]]
    saved: Callable[[Arguments], str] = _saves_nothing
    saved_shape: Callable[[Arguments], Sequence[Any]] = _no_shape
    saved_again: Callable[[Arguments], Tensor] | None = None
    passed_on: str | None = None


def register(spec: OpSpec, traced: Traced) -> None:
    """Give the declared ops ``spec.name`` and ``spec.name + "_backward"`` their functions."""
    ops = _Ops(spec, traced)
    register_op(
        spec.name,
        implementation=ops.forward,
        fake=ops.forward_fake,
        backward=ops.formula,
        setup_context=ops.setup_context,
    )
    register_op(f"{spec.name}_backward", implementation=ops.backward, fake=ops.backward_fake)


class _Ops:
    def __init__(self, spec: OpSpec, traced: Traced) -> None:
        self._spec, self._traced, self._backends = spec, traced, Backends(spec)
        self._names = tuple(
            name
            for group in spec.operands
            for name in ((group,) if isinstance(group, str) else group)
        )
        self._count = len(self._names)

    def forward(self, *given: Any) -> Any:
        """(operands, options, whether gradients are wanted, backend or ``""``) → (y, saved)."""
        call, needs_grad = self._call(given[:-2], given[-1]), given[-2]
        keeps = needs_grad and self._traced.saved(call) == "pre"
        y, pre = self._traced.forward(call, self._chosen(call, needs_grad), keeps)
        y = y.contiguous()
        if self._traced.saved is _saves_nothing:
            return y
        return y, y.new_empty(0) if pre is None else pre.contiguous()

    def forward_fake(self, *given: Any) -> Any:
        call, needs_grad = self._call(given[:-2], given[-1]), given[-2]
        y = given[0].new_empty(self._traced.shape(call))
        if self._traced.saved is _saves_nothing:
            return y
        keeps = needs_grad and self._traced.saved(call) == "pre"
        return y, y.new_empty(self._traced.saved_shape(call) if keeps else 0)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call, needs_grad, saved = self._call(inputs[:-2], inputs[-1]), inputs[-2], None
        if self._traced.saved is not _saves_nothing:
            y, pre = output
            kind = self._traced.saved(call)
            saved = y if kind == "output" else pre if needs_grad and kind == "pre" else None
            ctx.mark_non_differentiable(pre)
        ctx.save_for_backward(*inputs[: self._count], saved)
        ctx.options = inputs[self._count : -2]
        ctx.backend = inputs[-1]

    def formula(self, ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        *operands, saved = ctx.saved_tensors
        call = self._call((*operands, *ctx.options), ctx.backend)
        again = self._traced.saved_again
        if saved is None and again is not None and self._traced.saved(call) == "pre":
            saved = again(call)  # the caller asked for no gradients when it was traced
        wanted = ctx.needs_input_grad[: self._count]
        needs = [
            bool(need) and name != self._traced.passed_on
            for name, need in zip(self._names, wanted, strict=True)
        ]
        grads: Sequence[Any] = (None,) * self._count
        if any(needs):
            name, given = f"{self._spec.name}_backward", (*operands, *ctx.options)
            grads = library.call(name, dy, saved, *given, needs, ctx.backend)
        found = [g if need else None for g, need in zip(grads, needs, strict=True)]
        if self._traced.passed_on is not None:
            place = self._names.index(self._traced.passed_on)
            found[place] = dy if wanted[place] else None
        return (*found, *(None for _ in ctx.options), None, None)

    def backward(self, dy: Tensor, saved: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
        """(dy, saved, operands, options, needs, backend) → a gradient or nothing each."""
        call, needs = self._call(given[:-2], given[-1]), tuple(given[-2])
        grads = self._traced.backward(dy, saved, call, self._chosen(call, True), needs)
        return tuple(dy.new_empty(0) if g is None else g.contiguous() for g in grads)

    def backward_fake(self, dy: Tensor, _: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
        return tuple(
            dy.new_empty(t.shape if need and t is not None else (0,))
            for t, need in zip(given[: self._count], given[-2], strict=True)
        )

    def _call(self, given: Sequence[Any], backend: str) -> Arguments:
        """Operands in the structure of the spec, then its options."""
        held = iter(given)
        nested = tuple(
            next(held) if isinstance(group, str) else tuple(next(held) for _ in group)
            for group in self._spec.operands
        )
        return (*nested, *held, backend or None)

    def _chosen(self, call: Arguments, grad: bool) -> Chosen:
        """A forced backend that cannot serve is refused of empty tensors too."""
        empty = not all(t.numel() for t in leaves(call) if t is not None)
        if empty and call[-1] is None:
            return None
        found = self._backends.choices(call, grad)
        return None if empty else found
