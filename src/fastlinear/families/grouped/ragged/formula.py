"""The autograd formula of ragged_linear over the backends that compute all groups in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.core.errors import InputError
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.families.grouped.ragged import planes, products
from fastlinear.families.grouped.ragged.cuda import backend as cuda
from fastlinear.families.grouped.ragged.validation import counted
from fastlinear.fastpath import autograd_node
from fastlinear.op import differentiable

More = tuple[Tensor, Tensor | None]
"""group_sizes and bias, as one argument: the compiled fast path hands on three."""
_KEPT = {"none": (), "output": (autograd_node.OUTPUT,), "pre": (autograd_node.INTERNAL,)}
Needs = tuple[bool, bool, bool]
"""Which of dx, dW and db are wanted."""


@dataclass(frozen=True, slots=True)
class Formula:
    """What calls of one kind need besides their tensors.

    Attributes:
        activation: its name.
        backend: ``"cpp"``, ``"triton"``, ``"planes"``, ``"cuda"`` or ``"batch_invariant"``.
    """

    node: ClassVar[str] = "RaggedLinearBackward"
    kept_readers: ClassVar[None] = None
    activation: str
    backend: str

    @property
    def saved(self) -> str:
        """What the activation's derivative reads: ``"none"``, ``"output"`` or ``"pre"``."""
        return activation_of(self.activation).saved

    def reads_sizes(self, x: Tensor) -> bool:
        """Whether Python reads the sizes: what it does then cannot be recorded."""
        return self.backend == BATCH_INVARIANT and not x.is_cuda

    @property
    def keeps_sizes(self) -> bool:
        """Whether the backward reads a copy of the sizes, not the caller's tensor."""
        return self.backend not in ("triton", "planes", "cuda")

    @property
    def kept(self) -> tuple[int, ...]:
        """How the copy of the sizes, and what the derivative reads, are kept."""
        own = (autograd_node.INTERNAL,) if self.keeps_sizes else ()
        return (*own, *_KEPT[self.saved])

    @property
    def readers(self) -> tuple[int, ...]:
        """All tensors are kept, but the sizes where a copy is: second derivatives start from
        them."""
        return -1, -1, 0 if self.keeps_sizes else -1, -1

    def inference(self, x: Tensor, weight: Tensor, more: More) -> Tensor:
        """y (T, N)."""
        y: Tensor = self.functions()[0](x, weight, *more, self.activation, False)[0]
        return y

    def forward(self, x: Tensor, weight: Tensor, more: More) -> tuple[Tensor | None, ...]:
        """(y, the copy of the sizes where that is kept, the pre-activation or None where the
        derivative reads anything)."""
        kind = self.saved
        y, pre, sizes = self.functions()[0](x, weight, *more, self.activation, kind == "pre")
        found = (y, sizes) if self.keeps_sizes else (y,)
        return found if kind == "none" else (*found, pre)

    def gradients(
        self,
        dy: Tensor,
        _: None,
        __: tuple[int, ...],
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """(dx, dW, None, db), by PyTorch's differentiable ops where a graph or a transform asks.

        Args:
            dy: gradient of y, of its shape.
            tensors: x, weight, group_sizes (None where their copy is kept), bias.
            kept: the copy of the sizes where that is kept; then y or the pre-activation,
                whichever the activation keeps, if any.
            needs: which gradients are wanted, of x, weight, group_sizes and bias.
        """
        x, weight, sizes, bias = tensors
        assert x is not None
        assert weight is not None
        if self.keeps_sizes:
            sizes, kept = kept[0], kept[1:]
        assert sizes is not None
        fits = dy.shape == (x.shape[0], weight.shape[1]) and x.shape[1] == weight.shape[2]
        if not fits or sizes.shape[0] != weight.shape[0]:  # as ``.data`` may make it
            raise InputError(
                "ragged_linear",
                "x, weight and group_sizes of the shapes they had in the forward",
                f"{tuple(x.shape)}, {tuple(weight.shape)}, {tuple(sizes.shape)}",
                "Give tensors other data before the forward or behind the backward.",
            )
        wanted = needs[0], needs[1], needs[3]
        if torch.is_grad_enabled() or calls.beyond_memory(dy):
            read = counted(sizes, x.shape[0])
            run = partial(products.composed, sizes=read, activation=self.activation)
            dx, dw, db = differentiable.gradients(run, (x, weight, bias), wanted, dy)
        else:
            rest = (sizes, self.activation, wanted)
            dx, dw, db = self.functions()[1](dy, kept[0] if kept else None, x, weight, *rest)
        return dx, dw, None, db

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The backend's ``forward`` and ``backward``."""
        if self.backend == "cpp":
            from fastlinear.families.grouped.ragged.cpu import cpp

            return cpp.forward, cpp.backward
        if self.backend == BATCH_INVARIANT:
            from fastlinear.families.grouped.ragged import batch_invariant

            return batch_invariant.forward, batch_invariant.backward
        if self.backend == "planes":
            return planes.forward, planes.backward
        if self.backend == "cuda":
            return cuda.forward, cuda.backward
        from fastlinear.families.grouped.ragged.triton import backend as triton

        return triton.forward, triton.backward


class Ragged(torch.autograd.Function):
    """The formula in Python."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        group_sizes: Tensor,
        bias: Tensor | None,
        formula: Formula,
    ) -> Tensor:
        """y (T, N)."""
        y, *kept = formula.forward(x, weight, (group_sizes, bias))
        assert y is not None
        if formula.saved == "output":
            kept[-1] = y
        # The same in the same order as by the node in C++: a checkpoint counts on it.
        sizes = None if formula.keeps_sizes else group_sizes
        ctx.save_for_backward(x, weight, sizes, bias, *kept)
        ctx.formula = formula
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(dx, dW, None, db, None)."""
        saved, needs = ctx.saved_tensors, calls.wanted(ctx)[:4]
        found = ctx.formula.gradients(dy, None, dy.shape, saved[:4], saved[4:], needs)
        return (*found, None)
