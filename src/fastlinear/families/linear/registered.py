"""linear_act as registered ops, for torch.compile and export."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.linear import reference
from fastlinear.families.linear.autograd import backward_from, backward_of, run_backward
from fastlinear.families.linear.spec import SPEC
from fastlinear.op.registered import Chosen, Shape, Traced, register
from fastlinear.op.spec import Arguments


def _forward(call: Arguments, chosen: Chosen, saves: bool) -> tuple[Tensor, Sequence[Tensor]]:
    x, weight, bias, activation, _ = call
    run = reference.forward if chosen is None else chosen[0].load()
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y, pre = run(rows, weight, None if bias is None else bias.contiguous(), activation, saves)
    return y.contiguous().view(_shape(call)), [] if pre is None else [pre]


def _backward(
    dy: Tensor, saved: list[Tensor], call: Arguments, chosen: Chosen, needs: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    x, weight, _, activation, _ = call
    run = backward_from(reference.grad_pre, reference.grad_input, reference.grad_weight)
    if chosen is not None:
        run = backward_of(chosen)
    return run_backward(dy, saved[0] if saved else None, x, weight, activation, needs, run)


def _shape(call: Arguments) -> Shape:
    return (*call[0].shape[:-1], call[1].shape[0])


def _saved(call: Arguments) -> Sequence[Shape]:
    x, weight, _, activation, _ = call
    pre = math.prod(x.shape[:-1]), weight.shape[0]  # torch.Size.numel would fix M
    return [pre] if activation_of(activation).saved == "pre" else []


def _saved_again(call: Arguments) -> Sequence[Tensor]:
    x, weight, bias = call[:3]
    shape = math.prod(x.shape[:-1]), weight.shape[0]
    return [torch.nn.functional.linear(x, weight, bias).reshape(shape)]


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
