"""One direction of a call as a tape of the compiled fast path sees it: tensors by their numbers.

A backend's ``forward_steps`` and ``backward_steps`` add to the tape what its ``forward`` and
``backward`` would do, which must have run on tensors laid out so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastlinear.ops.common.tape import Tape
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.reference import Needs
from fastlinear.ops.grouped_linear.sign_mask import AnyPlace

Numbers = tuple[int | None, int | None, int | None]
"""dx, dW and db among a tape's tensors, None where not wanted."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a tape, as a backend reads it.

    Attributes:
        tensor: one laid out as it is; its memory counts where it is given to the tape.
        number: the tape's tensor whose memory it has, from the first element on.
    """

    tensor: Tensor
    number: int


@dataclass(frozen=True, slots=True)
class Forward:
    """y = act(x_g W_gᵀ + b_g) of tensors as ``reference.forward`` takes them.

    Attributes:
        shape: of y as the user sees it.
        save_pre: whether the pre-activation is a result as well.
        sign_mask: where the signs of y are, if they are a result as well.
    """

    tape: Tape
    x: Operand
    weight: Operand
    bias: Operand | None
    activation: str
    save_pre: bool
    order: str
    shape: tuple[int, ...]
    sign_mask: AnyPlace | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight, bias."""
        bias = self.bias
        return self.x.tensor, self.weight.tensor, None if bias is None else bias.tensor

    @property
    def numbers(self) -> Numbers:
        """Theirs."""
        return self.x.number, self.weight.number, number_of(self.bias)

    def results(self) -> tuple[int, int | None]:
        """New tensors for y and, where one is wanted, the pre-activation or the signs."""
        p, dtype = self.tape, self.x.tensor.dtype
        y = p.empty(self.shape, dtype, self.x.number)
        if self.sign_mask is not None:
            return y, p.empty(self.sign_mask.shape, torch.uint8, self.x.number)
        return y, p.empty(self.shape, dtype, self.x.number) if self.save_pre else None

    def like_y(self) -> Tensor:
        """A tensor without memory, laid out as y is for backends."""
        x = self.x.tensor
        return laid_out((*x.shape[:3], self.weight.tensor.shape[1]), self.order, x.dtype)


@dataclass(frozen=True, slots=True)
class Backward:
    """dx, dW and db of tensors as ``reference.backward`` takes them.

    Attributes:
        saved: y or the pre-activation as backends take it, or signs as they lie.
        shape: of x as the user sees it.
    """

    tape: Tape
    dy: Operand
    saved: Operand | None
    x: Operand
    weight: Operand
    activation: str
    needs: Needs
    order: str
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """dy, what was saved, x, weight."""
        saved = None if self.saved is None else self.saved.tensor
        return self.dy.tensor, saved, self.x.tensor, self.weight.tensor

    @property
    def numbers(self) -> tuple[int, int | None, int, int]:
        """Theirs."""
        return self.dy.number, number_of(self.saved), self.x.number, self.weight.number

    def results(self) -> Numbers:
        """New tensors for the gradients that are wanted."""
        x, weight = self.x.tensor, self.weight.tensor
        shapes = self.shape, weight.shape, weight.shape[:2]
        dx, dw, db = (
            self.tape.empty(shape, x.dtype, self.x.number) if need else None
            for shape, need in zip(shapes, self.needs, strict=True)
        )
        return dx, dw, db

    def like_dx(self) -> Tensor | None:
        """A tensor without memory, laid out as dx is for backends; None where it is not wanted."""
        x = self.x.tensor
        return laid_out(x.shape, self.order, x.dtype) if self.needs[0] else None

    def of_dpre(self, dpre: Operand) -> Backward:
        """What is left to do where dpre is known, and db with it."""
        needs = (*self.needs[:2], False)
        return replace(self, dy=dpre, saved=None, activation="none", needs=needs)


def laid_out(shape: tuple[int, ...], order: str, dtype: torch.dtype) -> Tensor:
    """(B, L, G, features) without memory, dense in that order."""
    return layouts.empty(shape, order, _NOWHERE, dtype)


def number_of(operand: Operand | None) -> int | None:
    """Its number; None for None."""
    return None if operand is None else operand.number


_NOWHERE = torch.empty(0, device="meta")
