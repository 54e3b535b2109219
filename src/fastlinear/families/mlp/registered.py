"""mlp as registered ops, for torch.compile and export.

The ops take the biases that there are, and a flag for each layer that says whether it has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.autograd import run_backward
from fastlinear.families.mlp.spec import SPEC
from fastlinear.op.registered import Chosen, Shape, Traced, chosen_or, register
from fastlinear.op.spec import Arguments


def _arguments(given: Sequence[Any], backend: str | None) -> Arguments:
    x, weights, present, has_bias, *names = given
    biases = iter(present)
    held = tuple(next(biases) if has else None for has in has_bias)
    return x, tuple(weights), held, *names, backend


def _forward(call: Arguments, chosen: Chosen, saves: bool) -> tuple[Tensor, Sequence[Tensor]]:
    x, weights, biases, *names, _ = call
    run = chosen_or(chosen, 0, reference.forward)
    dense = tuple(None if b is None else b.contiguous() for b in biases)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y, saved = run(rows, weights, dense, *names, saves)
    return y.contiguous().view(_shape(call)), saved[: len(_saved(call))]


def _backward(
    dy: Tensor, saved: list[Tensor], call: Arguments, chosen: Chosen, needs: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    x, weights, biases, *names, _ = call
    run = chosen_or(chosen, 1, reference.backward)
    layers = len(weights)
    flags = iter(needs[1 + layers :])
    need_bs = tuple(b is not None and next(flags) for b in biases)
    kept = [*saved, *[None] * (layers - len(saved))]
    wanted = needs[0], needs[1 : 1 + layers], need_bs
    dx, dws, dbs = run_backward(dy, x, weights, kept, names[0], names[1], wanted, run)
    return (dx, *dws, *(g for g, b in zip(dbs, biases, strict=True) if b is not None))


def _shape(call: Arguments) -> Shape:
    return (*call[0].shape[:-1], call[1][-1].shape[0])


def _saved(call: Arguments) -> Sequence[Shape]:
    """What every layer's backward reads, but for the last where that is y or nothing."""
    x, weights, final_activation = call[0], call[1], call[4]
    m = math.prod(x.shape[:-1])  # torch.Size.numel would fix M
    shapes = [(m, w.shape[0]) for w in weights]
    return shapes if activation_of(final_activation).saved == "pre" else shapes[:-1]


def _saved_again(call: Arguments) -> Sequence[Tensor]:
    x, weights, biases, *names, _ = call
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return reference.forward(rows, weights, biases, names[0], names[1], True)[1]


register(
    SPEC,
    Traced(
        shape=_shape,
        forward=_forward,
        backward=_backward,
        arguments=_arguments,
        saved=_saved,
        reads_result=lambda call: activation_of(call[4]).saved == "output",
        saved_again=_saved_again,
    ),
)
