"""diagonal_linear as registered ops, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlinear.families.diagonal import reference
from fastlinear.families.diagonal.autograd import run_backward
from fastlinear.families.diagonal.spec import SPEC
from fastlinear.op.registered import Chosen, Traced, chosen_or, register
from fastlinear.op.spec import Arguments


def _forward(call: Arguments, chosen: Chosen, _: bool) -> tuple[Tensor, Sequence[Tensor]]:
    x, weight, (bias, residual), activation, _ = call
    run = chosen_or(chosen, 0, reference.forward)
    added = None if residual is None else _rows(residual)
    bias = None if bias is None else bias.contiguous()
    y = run(_rows(x), weight.contiguous(), bias, activation, added, None)
    return y.contiguous().view(x.shape), []


def _backward(
    dy: Tensor, _: list[Tensor], call: Arguments, chosen: Chosen, needs: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    x, weight, (bias, _residual), activation, _ = call
    run = chosen_or(chosen, 1, reference.backward)
    bias = None if bias is None else bias.contiguous()
    given = dy, x, weight.contiguous(), bias, activation, (needs[0], needs[1], needs[2])
    return (*run_backward(*given, run), None)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


register(
    SPEC,
    Traced(
        shape=lambda call: call[0].shape,
        forward=_forward,
        backward=_backward,
        passed_on="residual",
    ),
)
