"""grouped_linear as registered ops, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.autograd import run_backward
from fastlinear.families.grouped.spec import SPEC
from fastlinear.op.registered import Chosen, Shape, Traced, chosen_or, register
from fastlinear.op.spec import Arguments


def _forward(call: Arguments, chosen: Chosen, saves: bool) -> tuple[Tensor, Sequence[Tensor]]:
    x, weight, bias, activation, layout, _ = call
    run = chosen_or(chosen, 0, reference.forward)
    rows = layouts.blocks(x, layout, weight.shape[0], weight.shape[2])
    order = layouts.order_of(layout, x.shape)
    y, pre = run(rows, weight, bias, activation, saves, order)
    y = layouts.unblocked(y, layout, x.shape)
    return y, [layouts.unblocked(pre, layout, x.shape)] if saves else []


def _backward(
    dy: Tensor, saved: list[Tensor], call: Arguments, chosen: Chosen, needs: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    x, weight, _, activation, layout, _ = call
    run = chosen_or(chosen, 1, reference.backward)
    wanted = needs[0], needs[1], needs[2]
    kept = saved[0] if saved else None
    return run_backward(dy, kept, x, weight, activation, layout, wanted, run)


def _shape(call: Arguments) -> Shape:
    x, weight, layout = call[0], call[1], call[4]
    return layouts.output_shape(layout, x.shape, weight.shape[0], weight.shape[1])


def _saved(call: Arguments) -> Sequence[Shape]:
    return [_shape(call)] if activation_of(call[3]).saved == "pre" else []


def _saved_again(call: Arguments) -> Sequence[Tensor]:
    x, weight, bias, _, layout, _ = call
    return [reference.grouped_linear(x, weight, bias, "none", layout)]


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
