"""Loops over the parts of a tensor inside a traced forward.

A trace has as many turns of a loop as there were parts. How many there are is asked again at each
call, before the first turn; where it is another number the class's own forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.rewrite.rules.grouped.modules.forward import (
    call_plain,
    layers_of,
    parameters_of,
    stacked,
)
from fastlinear.rewrite.rules.grouped.rows.forward import recorded
from fastlinear.rewrite.swap.forwards import overridden


def call_parts(
    parent: nn.Module, names: Sequence[str], parts: Sequence[Tensor], whole: Tensor
) -> tuple[Tensor, ...]:
    """The linears of these names inside ``parent``, each on its part (..., K) of ``whole``
    (..., G·K), as one call of ``grouped_linear``.

    Only while all are plain linears without hooks and of one size; otherwise each is called by
    itself.
    """
    layers = None if overridden() else layers_of(parent, names)
    ys = None
    if layers is not None and len(parts) == len(names) and _are_parts(parts, whole):
        ys = side_by_side(whole, *parameters_of(layers))
    if ys is not None:
        return ys
    return tuple(parent.get_submodule(n)(parts[i]) for i, n in enumerate(names))


def side_by_side(
    whole: Tensor, weights: Sequence[Any], biases: Sequence[Any]
) -> tuple[Tensor, ...] | None:
    """The linears (N, K) on the parts of ``whole`` (..., G·K); None where they are not of one kind
    or the input is none of theirs."""
    first = weights[0]
    if first is None or any(w is None or w.shape != first.shape for w in weights):
        return None
    if first.dim() != 2 or whole.shape[-1] != len(weights) * first.shape[1]:
        return None
    if whole.device != first.device or whole.dtype is not first.dtype:
        return None  # the layers say what is wrong, or autocast makes them fit
    found = stacked(weights, biases)
    if found is None:
        return None
    rows = whole.unflatten(-1, (len(weights), first.shape[1])).movedim(-2, 0)
    y = call_plain(rows, *found, "none", "g ... k", None)
    apart: Any = torch.unbind_copy  # its annotation knows the call with out= alone
    return recorded(apart(y), whole, weights, biases)  # each writable by itself


def _are_parts(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether these are equal chunks of the last dimension."""
    first = parts[0].shape
    if len(first) != whole.dim() or any(p.shape != first for p in parts):
        return False
    return first[-1] * len(parts) == whole.shape[-1]
