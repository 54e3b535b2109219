"""The one autograd formula of unequal_linear; the kernels of a device sit below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.errors import InputError
from fastlinear.ops.common import calls
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.unequal_linear import layout

Maybe = Sequence[Tensor | None]


def loop(
    xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Maybe | None, activation: str
) -> list[Tensor]:
    """The same by one product of PyTorch a group."""
    value = activation_of(activation).value
    given = (None,) * len(xs) if biases is None else biases
    return [value(F.linear(x, w, b)) for x, w, b in zip(xs, weights, given, strict=True)]


def kernels(x: Tensor) -> Any:
    """The module whose ``forward`` and ``backward`` compute on x's device."""
    if x.is_cuda:
        from fastlinear.ops.unequal_linear import cuda

        return cuda
    from fastlinear.ops.unequal_linear import cpu

    return cpu


@dataclass(frozen=True, slots=True)
class Formula:
    """Forward and gradients of all groups together under one activation."""

    activation: str

    @property
    def keeps(self) -> str:
        """What the activation's derivative reads: ``"none"``, ``"output"`` or ``"pre"``."""
        return activation_of(self.activation).saved

    def forward(
        self,
        xs: Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: Maybe | None,
        *,
        saving: bool = True,
    ) -> tuple[list[Tensor], Tensor | None]:
        """(the y_g, the buffer of the pre-activations where those are kept)."""
        first = xs[0]
        given = (None,) * len(xs) if biases is None else biases
        lines = [lined(x) for x in xs]
        call = layout.forward_call(
            layout.sizes_of(xs, weights),
            self.activation,
            first.dtype,
            (
                lines,
                layout.pitches_of(lines),
                [dense(w) for w in weights],
                [_maybe_dense(b) for b in given],
            ),
            saving and self.keeps == "pre",
            lambda count: torch.empty(count, dtype=first.dtype, device=first.device),
        )
        kernels(first).forward(call, first.device)
        shapes = [(*x.shape[:-1], w.shape[0]) for x, w in zip(xs, weights, strict=True)]
        pieces = zip(shapes, call.offsets, strict=True)
        ys = [layout.result(call.y, *piece) for piece in pieces]
        return ys, call.pre

    def inference(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Maybe | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """The same where nothing is kept."""
        return self.forward(xs, weights, biases, saving=False)

    def gradients(
        self, dys: Maybe, tensors: Maybe, kept: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """A gradient or None for each of ``tensors``, differentiable where a graph is asked for.

        Args:
            dys: gradient of each y, None for zeros.
            tensors: inputs, weights, then biases, one a group, or one None for no biases.
            kept: the y_g or the buffer of the pre-activations, whichever is kept.
            needs: which gradients are wanted.
        """
        groups = len(dys)
        xs: Any = tensors[:groups]
        weights: Any = tensors[groups : 2 * groups]
        grads = [
            x.new_zeros((*x.shape[:-1], w.shape[0])) if dy is None else dy
            for dy, x, w in zip(dys, xs, weights, strict=True)
        ]
        _check(grads, xs, weights)
        if torch.is_grad_enabled() or _watched(grads):
            return _differentiable(grads, tensors, needs, self.activation)
        needs = [need and t is not None for need, t in zip(needs, tensors, strict=True)]
        first = grads[0]
        outputs = [dense(y) for y in kept] if self.keeps == "output" else None
        lines = [lined(dy) for dy in grads], [lined(x) for x in xs]
        call, pieces = layout.backward_call(
            layout.sizes_of(xs, weights),
            self.activation,
            first.dtype,
            (
                lines[0],
                outputs,
                dense(kept[0]) if self.keeps == "pre" else None,
                lines[1],
                [dense(w) for w in weights],
            ),
            (layout.pitches_of(lines[0]), layout.pitches_of(lines[1])),
            [x.shape for x in xs],
            needs,
            lambda count: torch.empty(count, dtype=first.dtype, device=first.device),
        )
        kernels(first).backward(call, first.device)
        return tuple([layout.taken(piece) for piece in pieces])


class Together(torch.autograd.Function):
    """The formula as autograd runs it."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, groups: int, *given: Tensor | None) -> tuple[Any, ...]:
        """given: inputs, weights and biases of so many groups; the last may be None."""
        xs, weights, biases = (given[i * groups : (i + 1) * groups] for i in range(3))
        ys, pre = formula.forward(xs, weights, biases)  # type: ignore[arg-type]
        kept: Any = {"none": (), "output": ys, "pre": (pre,)}[formula.keeps]
        # The same is kept whatever is wanted, as by the node in C++: a checkpoint counts on it.
        ctx.save_for_backward(*given, *kept)
        ctx.call = formula, len(given)
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[2:]
        frozen = [y for g, y in enumerate(ys) if not any(needs[g::groups])]
        ctx.mark_non_differentiable(*frozen)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the inputs, weights and biases."""
        formula, count = ctx.call
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        return (None, None, *formula.gradients(dys, saved[:count], saved[count:], needs))


def recorded(
    formula: Formula, xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Maybe | None
) -> list[Tensor]:
    """The y_g, with the formula behind them."""
    groups = len(xs)
    given = (None,) * groups if biases is None else biases
    return list(Together.apply(formula, groups, *xs, *weights, *given))


def dense(t: Tensor) -> Tensor:
    """t in dense memory, as it reads."""
    return t if t.is_contiguous() and not t.is_neg() else t.resolve_neg().contiguous()


def lined(t: Tensor) -> Tensor:
    """t with dense rows at one distance, as it reads."""
    return dense(t) if t.is_neg() or layout.pitch_of(t) is None else t


def _maybe_dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else dense(t)


def _check(dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Kernels trust sizes, which ``.data`` of a saved tensor may have changed."""
    for g, (dy, x, w) in enumerate(zip(dys, xs, weights, strict=True)):
        if dy.shape != (*x.shape[:-1], w.shape[0]) or x.shape[-1] != w.shape[1]:
            raise InputError(
                "unequal_linear",
                f"input and weight {g} of the shapes they had in the forward",
                f"{tuple(x.shape)} and {tuple(w.shape)} for dy {tuple(dy.shape)}",
                "Give tensors other data before the forward or behind the backward.",
            )


def _watched(grads: Sequence[Tensor]) -> bool:
    """Whether gradients are batched or dual: kernels have no rules for those."""
    if calls.transforms_active() or calls.forward_mode():
        return True
    batched = torch._C._functorch.is_legacy_batchedtensor
    return any(type(dy) not in calls.PLAIN or batched(dy) for dy in grads)


def _differentiable(
    dys: Sequence[Tensor], tensors: Maybe, needs: Sequence[bool], activation: str
) -> tuple[Tensor | None, ...]:
    groups = len(dys)
    # views make each argument a node of its own: gradients must stop at the arguments
    with torch.enable_grad():
        own = [None if t is None else t.view_as(t) for t in tensors]
        xs: Any = own[:groups]
        weights: Any = own[groups : 2 * groups]
        biases = own[2 * groups :] if len(own) == 3 * groups else None
        pairs = zip(loop(xs, weights, biases, activation), dys, strict=True)
        ys, grads = zip(*((y, dy) for y, dy in pairs if y.requires_grad), strict=True)
        wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(ys, wanted, grads, create_graph=True))
    return tuple(
        [
            next(found) if need and t is not None else None
            for t, need in zip(own, needs, strict=True)
        ]
    )
