"""gated_mlp as registered ops, for torch.compile and export.

Without a down weight they are ``gated_linear``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastlinear.families.gated import reference
from fastlinear.families.gated.autograd import as_rows, run_backward
from fastlinear.families.gated.spec import NAME, SPEC
from fastlinear.families.gated.stacking import Biases, Weights, out_features
from fastlinear.op.registered import Chosen, Shape, Traced, chosen_or, register
from fastlinear.op.spec import Arguments


def _arguments(given: Sequence[Any], backend: str | None) -> Arguments:
    x, weights, biases = given[0], Weights(*given[1:4]), Biases(*given[4:7])
    activation, order, recompute = given[7:]
    return x, weights, biases, NAME, activation, order, str(int(recompute)), backend


def _forward(call: Arguments, chosen: Chosen, saves: bool) -> tuple[Tensor, Sequence[Tensor]]:
    x, weights, biases, _, activation, order, _, _ = call
    run = chosen_or(chosen, 0, reference.forward)
    y, *pre = run(as_rows(x), weights, biases, activation, order, saves)
    return y.contiguous().view(_shape(call)), [t for t in pre if t is not None]


def _backward(
    dy: Tensor, saved: list[Tensor], call: Arguments, chosen: Chosen, needs: Any
) -> Sequence[Tensor | None]:
    x, weights, biases, _, activation, order, _, _ = call
    run = chosen_or(chosen, 1, reference.backward)
    first, second = (*saved, None, None)[:2]
    pre = None if first is None else (first, second)
    return run_backward(dy, pre, x, weights, biases, activation, order, needs, run)


def _shape(call: Arguments) -> Shape:
    return (*call[0].shape[:-1], out_features(call[1]))


def _saved(call: Arguments) -> Sequence[Shape]:
    """Both pre-activations, stacked where the weights are; none where they are formed again."""
    x, weights, level = call[0], call[1], call[6]
    shape = math.prod(x.shape[:-1]), weights.gate.shape[0]
    return [] if level == "1" else [shape] * (1 if weights.up is None else 2)


def _saved_again(call: Arguments) -> Sequence[Tensor]:
    x, weights, biases = call[:3]
    pre = reference.pre_activations(as_rows(x), weights, biases)
    return [t for t in pre if t is not None]


register(
    SPEC,
    Traced(
        shape=_shape,
        forward=_forward,
        backward=_backward,
        arguments=_arguments,
        saved=_saved,
        saved_again=_saved_again,
        summed="down_bias",
    ),
)
