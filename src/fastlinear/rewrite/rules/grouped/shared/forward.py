"""Linears of one tensor as one call: what the first of them makes for all.

A forward may leave out a linear, or the result of one, on any call. Of such a linear there are no
gradients, where those of one product would be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import (
    LISTS,
    Way,
    fit,
    parallel_layers,
)
from fastlinear.rewrite.rules.grouped.rows import forward as rows

_LISTED = Way(("none",), LISTS)


def together(x: Tensor, weights: Sequence[Any], biases: Sequence[Any]) -> Sequence[Tensor] | None:
    """The linears (N, K) of one input as one product; None where they are not of one kind."""
    given = (x, *weights, *(b for b in biases if b is not None))
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return rows.together(x, weights, biases)
    if not rows.take(x, weights, biases):
        return None
    read = _Read()
    weight, bias = _Join.apply(read, len(weights), *weights, *biases)
    ys = _Split.apply(read, rows.product(x, weight, bias), *map(len, weights))
    return rows.recorded(ys, x, weights, biases)


def listed(x: Tensor, weights: Sequence[Any], biases: Sequence[Any]) -> Sequence[Tensor] | None:
    """The same as one call of ``unequal_linear``."""
    xs, layers, held = (x,) * len(weights), [list(weights)], [list(biases)]
    if not fit(xs, layers, held, _LISTED):
        return None
    return parallel_layers(xs, layers, held, way=_LISTED)


class _Read:
    """Which results have a gradient in the backward that is under way."""

    __slots__ = ("results",)

    def __init__(self) -> None:
        self.results: list[bool] = []


class _Join(torch.autograd.Function):
    """Weights and biases as those of one linear."""

    @staticmethod
    def forward(ctx: Any, read: _Read, count: int, *given: Any) -> tuple[Tensor, Tensor | None]:
        """given: so many weights, then as many biases or None."""
        weights, biases = given[:count], given[count:]
        ctx.read, ctx.sizes = read, [len(w) for w in weights]
        ctx.set_materialize_grads(False)
        return rows.behind_one_another(weights, biases)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Parts of the gradients, None for what had no part in the loss."""
        count, found = len(ctx.sizes), list[Tensor | None]()
        for g, gradient in enumerate(gradients):
            if gradient is None:
                found += [None] * count
                continue
            needs = ctx.needs_input_grad[2 + g * count :]
            parts = zip(gradient.split(ctx.sizes), ctx.read.results, needs, strict=False)
            found += [part if read and need else None for part, read, need in parts]
        return None, None, *found


class _Split(torch.autograd.Function):
    """The results of each linear, copied apart."""

    @staticmethod
    def forward(ctx: Any, read: _Read, y: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """y (..., sum of sizes) → (..., size) of each."""
        ctx.read, ctx.shapes = read, [(*y.shape[:-1], n) for n in sizes]
        ctx.set_materialize_grads(False)
        split: Any = torch.split_with_sizes_copy  # its annotation knows the call with out= alone
        return tuple(split(y, sizes, -1))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        """The gradient of y, 0 where none arrives."""
        ctx.read.results = [dy is not None for dy in dys]
        first = next((dy for dy in dys if dy is not None), None)
        dy = None
        if first is not None:
            pairs = zip(dys, ctx.shapes, strict=True)
            dy = torch.cat([first.new_zeros(s) if dy is None else dy for dy, s in pairs], -1)
        return None, dy, *(None for _ in dys)
