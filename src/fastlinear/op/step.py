"""The piece ``step`` of a family: forward and backward of one call, as autograd runs them.

``eager`` is PyTorch's own autograd, ``pieces`` the family's formula over the backends chosen for
forward and backward. What the host does for each is part of their time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.select import Choice, select
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.op.front import Front
from fastlinear.op.spec import Arguments, Resolved, first, kind, leaves, mapped

AsCall = Callable[[tuple[Any, ...]], tuple[Arguments, Tensor]]
"""Inputs of the piece → (the call's arguments without the backend, the gradient of its result)."""


def _as_given(inputs: tuple[Any, ...]) -> tuple[Arguments, Tensor]:
    return inputs[:-1], inputs[-1]


class Pieces:
    """Training calls of a family by its formula over chosen pieces, recorded as callers' calls are:
    the arguments of the public call but the backend → the result."""

    def __init__(self, front: Front, name: str, chosen: tuple[Choice, ...] | None = None) -> None:
        """
        Args:
            name: of the table in C++ that its plans go to.
            chosen: the choice of each piece; by default dispatch's, for each kind of call.
        """
        self._front, self._name, self._chosen = front, name, chosen
        self._plans: dict[Any, Resolved] = {}

    def forget(self) -> None:
        """Forget all plans."""
        self._plans.clear()
        found = lookup.table(self._name) if lookup.ready() else None
        if found is not None:
            found.clear()

    def __call__(self, *arguments: Any) -> Any:
        table = step_table(self._name, first(arguments).is_cuda)
        y = None if table is None else table.call(*arguments)
        if y is not None:
            return y
        key = kind(arguments)
        found = self._plans.get(key)
        if found is None:
            spec, call = self._front.spec, (*arguments, None)
            chosen = self._chosen or spec.pieces(spec.problem(call, True))
            found = self._plans[key] = spec.train(call, chosen)
        y = found.plan(*arguments[:3])
        if table is not None and found.record is not None and table.wants(*arguments):
            made = found.record(*arguments[:3])
            if made is not None:
                table.admit(*arguments, made)
        return y


class Step:
    """The two backends of a family's step.

    Attributes:
        as_call: inputs of the piece → the call, and the gradient of its result.
    """

    def __init__(self, front: Front, as_call: AsCall = _as_given) -> None:
        self._front, self.as_call = front, as_call
        self._by_pieces = Pieces(front, f"{front.spec.name}.step")
        cache.on_change(self._by_pieces.forget)

    def eager(self, *inputs: Any) -> tuple[Any, ...]:
        """(result, a gradient for each tensor or None) by PyTorch's own autograd."""
        return self._trained(self._by_torch, inputs)

    def pieces(self, *inputs: Any) -> tuple[Any, ...]:
        """The same by the formula over the chosen pieces."""
        return self._trained(self._by_pieces, inputs)

    def _by_torch(self, *arguments: Any) -> Any:
        return self._front.spec.reference(*arguments, None)

    def _trained(self, run: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        arguments, dy = self.as_call(inputs)
        call = mapped(lambda t: t.detach().requires_grad_(), arguments)
        tensors = list(leaves(call))
        with torch.enable_grad():
            y = run(*call)
            grads = iter(torch.autograd.grad(y, [t for t in tensors if t is not None], dy))
        return y.detach(), *(None if t is None else next(grads) for t in tensors)


@once
def step_table(name: str, on_cuda: bool) -> lookup.Table | None:
    """The table of a family's steps, waiting for its library: callers take it once it is there.

    None where it cannot be built or does not serve the device.
    """
    if not (lookup.wait(lookup.PATIENCE_S) and autograd_node.wait(lookup.PATIENCE_S)):
        return None
    if on_cuda and not (lookup.serves_cuda() and autograd_node.serves_cuda()):
        return None
    return lookup.table(name)


def choose_whole(p: Problem, backend: str | None, _: Arguments) -> tuple[Choice, ...]:
    """The choice of a family whose training calls are one step, forward and backward together."""
    return (select(p, backend),)


def trained(call: Callable[..., Any], *inputs: Any) -> tuple[Tensor | None, ...]:
    """The results of a call and a gradient for each tensor, or None, as autograd runs it.

    Args:
        inputs: the call's arguments without the backend, then the gradients of its results.
    """
    *given, dy = inputs
    own = mapped(_leaf, tuple(given))
    with torch.enable_grad():
        found = call(*own)
        ys = (found,) if isinstance(found, Tensor) else tuple(found)
        wanted = [t for t in leaves(own) if t is not None and t.requires_grad]
        grads = iter(torch.autograd.grad(ys, wanted, dy))
    each = (t is not None and t.requires_grad for t in leaves(own))
    return (*(y.detach() for y in ys), *(next(grads) if has else None for has in each))


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t
