"""ragged_linear as registered ops, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.families.grouped.ragged import products
from fastlinear.families.grouped.ragged.formula import Formula
from fastlinear.families.grouped.ragged.spec import SPEC
from fastlinear.fastpath import recorder
from fastlinear.op import library
from fastlinear.op.registered import Chosen, Shape, Traced, register
from fastlinear.op.spec import Arguments


def _formula(call: Arguments, chosen: Chosen) -> Formula | None:
    """The formula of what serves a call; None for PyTorch's own products."""
    if chosen is None or calls.transforms_active():
        return None
    if calls.watched() and recorder.active() is None:
        return None
    name = chosen[0].backend.name
    return None if name == "eager" else Formula(call[3], name)


def _forward(call: Arguments, chosen: Chosen, saves: bool) -> tuple[Tensor, Sequence[Tensor]]:
    x, weight, (sizes, bias), activation, _ = call
    formula = _formula(call, chosen)
    if formula is not None:
        y, pre, _ = formula.functions()[0](x, weight, sizes, bias, activation, saves)
        return y, [pre] if saves else []
    y = products.loop(x, weight, sizes, bias, activation)
    return y, [products.loop(x, weight, sizes, bias, "none")] if saves else []


def _backward(
    dy: Tensor, saved: list[Tensor], call: Arguments, chosen: Chosen, needs: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    x, weight, (sizes, bias), activation, _ = call
    wanted = needs[0], needs[1], needs[3]
    formula = _formula(call, chosen)
    if formula is not None:
        given = dy, saved[0] if saved else None, x, weight, sizes, activation, wanted
        dx, dw, db = formula.functions()[1](*given)
        return dx, dw, None, db
    own: list[Any] = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    with torch.enable_grad():
        y = products.loop(own[0], own[1], sizes, own[2], activation)
        asked = [t for t, need in zip(own, wanted, strict=True) if need]
        found = iter(torch.autograd.grad(y, asked, dy))
    dx, dw, db = (next(found) if need else None for need in wanted)
    return dx, dw, None, db


def _shape(call: Arguments) -> Shape:
    return call[0].shape[0], call[1].shape[1]


def _saved(call: Arguments) -> Sequence[Shape]:
    return [_shape(call)] if activation_of(call[3]).saved == "pre" else []


def _saved_again(call: Arguments) -> Sequence[Tensor]:
    x, weight, (sizes, bias) = call[:3]
    return [library.call(SPEC.name, x, weight, sizes, bias, "none", False, "")[0]]


register(
    SPEC,
    Traced(
        shape=_shape,
        forward=_forward,
        backward=_backward,
        saved=_saved,
        reads_result=lambda call: activation_of(call[3]).saved == "output",
        saved_again=_saved_again,
    ),
)
