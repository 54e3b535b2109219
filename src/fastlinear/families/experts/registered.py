"""experts as registered ops, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastlinear.core import calls
from fastlinear.families.experts import reference, routed
from fastlinear.families.experts.formula import Formula
from fastlinear.families.experts.gate import gate_of
from fastlinear.families.experts.spec import SPEC, formula_of
from fastlinear.fastpath import recorder
from fastlinear.op import library
from fastlinear.op.registered import Chosen, Shape, Traced, register
from fastlinear.op.spec import Arguments, leaves


def _formula(call: Arguments, chosen: Chosen) -> Formula | None:
    """The formula of what serves a call; None for PyTorch's own ops."""
    if chosen is None or calls.transforms_active():
        return None
    if calls.watched() and recorder.active() is None:
        return None
    name = chosen[0].backend.name
    return None if name == "eager" else formula_of(call, name)


def _forward(call: Arguments, chosen: Chosen, saves: bool) -> tuple[Tensor, Sequence[Tensor]]:
    formula = _formula(call, chosen)
    if formula is not None:
        y, kept = routed.forward(formula.way, call[0], call[1], call[2])
        return y, [kept.pre] if saves and kept.pre is not None else []
    y, pre = _by_torch(call, leaves(call))
    return y, [pre.contiguous()] if saves else []


def _backward(
    dy: Tensor, saved: list[Tensor], call: Arguments, chosen: Chosen, needs: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    formula = _formula(call, chosen)
    if formula is not None:
        x, weights, routing = call[:3]
        kept = routed.kept_again(formula.way, x, weights, routing, saved[0] if saved else None)
        return routed.backward(formula.way, dy, x, weights, routing, kept, needs)
    own = [
        t if t is None or not need else t.detach().requires_grad_()
        for t, need in zip(leaves(call), needs, strict=True)
    ]
    # inside a registered op nothing is recorded for gradients where a mode watches it
    below = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with _disable_current_modes(), below, torch.enable_grad():
        y, _ = _by_torch(call, own)
        wanted = [t for t, need in zip(own, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, dy))
    return [next(found) if need else None for need in needs]


def _by_torch(call: Arguments, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
    x, gate_up, down, *routing = tensors
    activation, order, numbers, first = call[3:7]
    gate = gate_of(activation, order, numbers)
    return reference.with_pre(x, (gate_up, down), tuple(routing), gate, int(first))  # type: ignore[arg-type]


def _shape(call: Arguments) -> Shape:
    return call[0].shape


def _saved(call: Arguments) -> Sequence[Shape]:
    recompute, gate_up, index = call[7], call[1][0], call[2][0]
    return [] if recompute else [(index.shape[0] * index.shape[1], gate_up.shape[1])]


def _saved_again(call: Arguments) -> Sequence[Tensor]:
    return [library.call(SPEC.name, *leaves(call), *call[3:8], True, call[8] or "")[1]]


register(
    SPEC,
    Traced(
        shape=_shape,
        forward=_forward,
        backward=_backward,
        saved=_saved,
        saved_again=_saved_again,
    ),
)
