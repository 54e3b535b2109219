"""Where the gate and the up half lie: in two tensors, or in one with twice the features.

``"apart"``: two tensors. ``"gate_up"``: gate first, up behind it. ``"up_gate"``: the other way
round. ``"interleaved"``: gate and up in turns, gate first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STACKED = ("gate_up", "up_gate", "interleaved")
ORDERS = ("apart", *STACKED)


class Weights(NamedTuple):
    """The matrices of a call: gate (H, K), or gate and up stacked (2H, K); up (H, K), None where
    stacked; down (N, H), None for ``gated_linear``. A call's biases are the same with vectors, any
    of them None."""

    gate: Tensor
    up: Tensor | None
    down: Tensor | None


class Biases(NamedTuple):
    """gate (H,) or stacked (2H,), up (H,), down (N,); each may be None."""

    gate: Tensor | None
    up: Tensor | None
    down: Tensor | None


Pre = tuple[Tensor, Tensor | None]
"""Pre-activations: (gate (M, H), up (M, H)), or (both (M, 2H), None) where stacked."""
Needs = tuple[bool, bool, bool, bool, bool, bool, bool]
"""Which gradients are wanted: x, gate, up and down weight, gate, up and down bias."""
Gradients = tuple[Tensor | None, ...]
"""Seven, in the order of ``Needs``; None where not wanted, or where there is no such tensor."""
NO_BIASES = Biases(None, None, None)


def hidden(weights: Weights) -> int:
    """H."""
    return weights.gate.shape[0] if weights.up is not None else weights.gate.shape[0] // 2


def out_features(weights: Weights) -> int:
    """Features of y: N, or H without a down projection."""
    return hidden(weights) if weights.down is None else weights.down.shape[0]


def halves(first: Tensor, second: Tensor | None, order: str, dim: int) -> tuple[Tensor, Tensor]:
    """(gate, up) as views: of ``first`` along ``dim``, counted from the left, where it holds both,
    else the two given."""
    if order == "apart":
        assert second is not None
        return first, second
    size = first.shape[dim] // 2
    if order == "interleaved":
        gate, up = first.unflatten(dim, (size, 2)).unbind(dim + 1)
        return gate, up
    one, other = first.narrow(dim, 0, size), first.narrow(dim, size, size)
    return (one, other) if order == "gate_up" else (other, one)


def split_weights(weights: Weights, order: str) -> tuple[Tensor, Tensor]:
    """Gate and up weight, each (H, K), as views."""
    return halves(weights.gate, weights.up, order, 0)


def split_biases(biases: Biases, order: str) -> tuple[Tensor | None, Tensor | None]:
    """Gate and up bias, each (H,), as views."""
    return halves_of_any(biases.gate, biases.up, order)


def halves_of_any(
    first: Tensor | None, second: Tensor | None, order: str
) -> tuple[Tensor | None, Tensor | None]:
    """``halves`` of weights or biases, or of their gradients, of which any may be None."""
    if order == "apart" or first is None:
        return first, second
    return halves(first, None, order, 0)


def split_pre(pre: Pre, order: str) -> tuple[Tensor, Tensor]:
    """Gate and up pre-activation, each (..., H), as views."""
    return halves(pre[0], pre[1], order, pre[0].dim() - 1)


def empty_like(pre: Pre) -> Pre:
    """Uninitialised memory laid out as pre-activations are, dense."""
    first = torch.empty(pre[0].shape, dtype=pre[0].dtype, device=pre[0].device)
    return first, None if pre[1] is None else torch.empty_like(first)


def empty_pre(x: Tensor, size: int, order: str) -> Pre:
    """Uninitialised memory for the pre-activations of x (M, K), H = ``size``."""
    if order == "apart":
        return x.new_empty(len(x), size), x.new_empty(len(x), size)
    return x.new_empty(len(x), 2 * size), None
