"""linear_act as registered ops, for torch.compile and export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.op.registered import Chosen, Traced, register
from fastlinear.op.spec import Arguments
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act import reference
from fastlinear.ops.linear_act.autograd import backward_from, backward_of, run_backward
from fastlinear.ops.linear_act.spec import SPEC


def _forward(call: Arguments, chosen: Chosen, keeps: bool) -> tuple[Tensor, Tensor | None]:
    x, weight, bias, activation, _ = call
    run = reference.forward if chosen is None else chosen[0].backend.load()
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y, pre = run(rows, weight, None if bias is None else bias.contiguous(), activation, keeps)
    return y.contiguous().view(_shape(call)), pre


def _backward(
    dy: Tensor, saved: Tensor | None, call: Arguments, chosen: Chosen, needs: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    x, weight, _, activation, _ = call
    run = backward_from(reference.grad_pre, reference.grad_input, reference.grad_weight)
    if chosen is not None:
        run = backward_of(chosen)
    return run_backward(dy, saved, x, weight, activation, needs, run)


def _shape(call: Arguments) -> Sequence[Any]:
    return (*call[0].shape[:-1], call[1].shape[0])


def _saved_shape(call: Arguments) -> Sequence[Any]:
    return math.prod(call[0].shape[:-1]), call[1].shape[0]  # torch.Size.numel would fix M


def _saved_again(call: Arguments) -> Tensor:
    return torch.nn.functional.linear(*call[:3]).reshape(tuple(_saved_shape(call)))


register(
    SPEC,
    Traced(
        shape=_shape,
        forward=_forward,
        backward=_backward,
        saved=lambda call: activation_of(call[3]).saved,
        saved_shape=_saved_shape,
        saved_again=_saved_again,
    ),
)
