"""The one autograd formula of unequal_linear; the kernels of a device sit below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.core.errors import InputError
from fastlinear.families.grouped.unequal import layout
from fastlinear.op import differentiable

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
        from fastlinear.families.grouped.unequal.cuda import backend

        return backend
    from fastlinear.families.grouped.unequal.cpu import cpp

    return cpp


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
        given = (None,) * len(xs) if biases is None else biases
        call = layout.forward_call(
            layout.sizes_of(xs, weights),
            self.activation,
            [lined(x) for x in xs],
            [dense(w) for w in weights],
            [dense(b) for b in given],
            saving and self.keeps == "pre",
        )
        kernels(xs[0]).forward(call, xs[0].device)
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
        self,
        dys: Maybe,
        tensors: Maybe,
        kept: Maybe,
        needs: Sequence[bool],
        sizes: layout.Sizes | None = None,
    ) -> tuple[Tensor | None, ...]:
        """A gradient or None for each of ``tensors``, differentiable where a graph is asked for.

        Args:
            dys: gradient of each y; None for one that is not used, whose group has no gradients.
            tensors: inputs, weights, then biases, one a group, or one None for no biases. Unless
                a graph is asked for, those that no wanted gradient reads may be None.
            kept: the y_g or the buffer of the pre-activations, whichever is kept.
            needs: which gradients are wanted.
            sizes: those of the forward; None for those of ``tensors``, which are then all given.
        """
        groups = len(dys)
        xs: Any = tensors[:groups]
        weights: Any = tensors[groups : 2 * groups]
        sizes = sizes or layout.sizes_of(xs, weights)
        needs = used(needs, dys)
        _check(dys, xs, weights, sizes)
        if torch.is_grad_enabled() or _watched(dys):
            return _differentiable(dys, tensors, needs, self.activation)
        first = next(dy for dy in dys if dy is not None)
        call, pieces = layout.backward_call(
            sizes,
            self.activation,
            [lined(dy) for dy in dys],
            [dense(y) for y in kept] if self.keeps == "output" else None,
            dense(kept[0]) if self.keeps == "pre" else None,
            [lined(x) for x in xs],
            [dense(w) for w in weights],
            needs,
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
        # Copies of outputs: autograd hands out all that is saved or nothing, and one output changed
        # in place must not take the gradients of the others.
        copies = layout.copies(ys) if formula.keeps == "output" else []
        kept: Any = {"none": (), "output": copies, "pre": (pre,)}[formula.keeps]
        # The same is kept whatever is wanted, as by the node in C++: a checkpoint counts on it.
        ctx.save_for_backward(*given, *kept)
        ctx.call = formula, len(given), layout.sizes_of(xs, weights)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[2:]
        frozen = [y for g, y in enumerate(ys) if not any(needs[g::groups])]
        ctx.mark_non_differentiable(*frozen)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the inputs, weights and biases."""
        formula, count, sizes = ctx.call
        needs = calls.wanted(ctx)[2:]
        if all(dy is None for dy in dys):
            return (None,) * (2 + len(needs))
        saved = ctx.saved_tensors
        return (None, None, *formula.gradients(dys, saved[:count], saved[count:], needs, sizes))


def applied(
    formula: Formula, xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Maybe | None
) -> list[Tensor]:
    """The y_g, with the formula behind them."""
    groups = len(xs)
    given = (None,) * groups if biases is None else biases
    return list(Together.apply(formula, groups, *xs, *weights, *given))


def used(needs: Sequence[bool], dys: Maybe) -> list[bool]:
    """Which of the wanted gradients there are: those of groups whose output is used."""
    return [need and dys[i % len(dys)] is not None for i, need in enumerate(needs)]


@overload
def dense(t: Tensor) -> Tensor: ...
@overload
def dense(t: Tensor | None) -> Tensor | None: ...
def dense(t: Tensor | None) -> Tensor | None:
    """t in dense memory, as it reads."""
    if t is None or (t.is_contiguous() and not t.is_neg()):
        return t
    return t.resolve_neg().contiguous()


@overload
def lined(t: Tensor) -> Tensor: ...
@overload
def lined(t: Tensor | None) -> Tensor | None: ...
def lined(t: Tensor | None) -> Tensor | None:
    """t with dense rows at one distance, as it reads."""
    if t is None or (not t.is_neg() and layout.pitch_of(t) is not None):
        return t
    return dense(t)


def _check(dys: Maybe, xs: Maybe, weights: Maybe, sizes: layout.Sizes) -> None:
    """Kernels trust sizes, which ``.data`` of a saved tensor may have changed."""
    for g, (dy, x, w, (m, n, k)) in enumerate(zip(dys, xs, weights, sizes, strict=True)):
        if dy is None:
            continue
        if (
            (x is not None and x.shape != (*dy.shape[:-1], k))
            or (w is not None and w.shape != (n, k))
            or dy.numel() != m * n
        ):
            given = " and ".join(str(tuple(t.shape)) for t in (x, w) if t is not None)
            raise InputError(
                "unequal_linear",
                f"input and weight {g} of the shapes they had in the forward",
                f"{given} for dy {tuple(dy.shape)}",
                "Give tensors other data before the forward or behind the backward.",
            )


def _watched(dys: Maybe) -> bool:
    """Whether kernels have no rules for the gradients."""
    given = [dy for dy in dys if dy is not None]
    return calls.beyond_memory(*given) or any(type(dy) not in calls.PLAIN for dy in given)


def _differentiable(
    dys: Maybe, tensors: Maybe, needs: Sequence[bool], activation: str
) -> tuple[Tensor | None, ...]:
    groups = len(dys)
    graded = [
        any(t is not None and t.requires_grad for t in tensors[g::groups]) for g in range(groups)
    ]
    there = [g for g, dy in enumerate(dys) if dy is not None and graded[g]]

    def run(*own: Any) -> list[Tensor]:
        lists = (own[i * groups : (i + 1) * groups] for i in range(3))
        xs, weights, biases = (
            [ts[g] for g in there] if len(ts) == groups else None for ts in lists
        )
        return loop(xs, weights, biases, activation)  # type: ignore[arg-type]

    return differentiable.gradients(run, tensors, needs, [dys[g] for g in there])
