"""Layouts of x and y: each is a view of (B, L, G, features), so backends know one shape only.

B and L are two token axes; where all tokens lie at one stride, B is 1. An order is how results lie
in memory: which axes of (B, L, G, features) come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.calls import as_result

SHARED = "... k"
"""The layout of one input for all groups."""


@dataclass(frozen=True)
class Layout:
    """How a user's x holds its groups and features.

    Attributes:
        pattern: the shape of x, as einops would write it.
        order: how results lie in memory, a name in ``ORDERS``.
        merged: whether groups and features share one dimension.
        least: the fewest dimensions of x.
    """

    pattern: str
    order: str
    merged: bool
    least: int


LAYOUTS: dict[str, Layout] = {
    layout.pattern: layout
    for layout in (
        Layout("... (g k)", "tokens", True, 1),
        Layout("... g k", "tokens", False, 2),
        Layout("g ... k", "groups", False, 2),
        Layout("b (g k) ...", "channels", True, 2),
        Layout("b g k ...", "channels", False, 3),
    )
}
"""Layouts in which each group has its own input, by pattern."""

NAMES = (*LAYOUTS, SHARED)

# Axes of (B, L, G, features) as they lie in memory, slowest first, and the way back.
_MEMORY = {"tokens": (0, 1, 2, 3), "groups": (2, 0, 1, 3), "channels": (0, 2, 3, 1)}
_AXES = {"tokens": (0, 1, 2, 3), "groups": (1, 2, 0, 3), "channels": (0, 3, 1, 2)}
ORDERS = tuple(_MEMORY)


def features_of(x_shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """The dimensions of x that a weight (G, N, K) fixes: (G·K,) where they are merged, else
    (G, K). x has at least the layout's fewest dimensions."""
    here = LAYOUTS[layout]
    if here.order == "channels":
        return (x_shape[1],) if here.merged else (x_shape[1], x_shape[2])
    if here.merged:
        return (x_shape[-1],)
    return x_shape[0 if here.order == "groups" else -2], x_shape[-1]


def order_of(layout: str, x_shape: Sequence[int]) -> str:
    """How y lies in memory. Channels of one position lie as tokens do."""
    here = LAYOUTS[layout]
    if here.order == "channels" and math.prod(x_shape[2 if here.merged else 3 :]) == 1:
        return "tokens"
    return here.order


def blocks(x: Tensor, layout: str, groups: int, k: int) -> Tensor:
    """x as (B, L, G, K): a view, but where three token dimensions or more have no common stride."""
    here = LAYOUTS[layout]
    if here.order == "channels":
        if here.merged:
            x = x.unflatten(1, (groups, k))
        length = math.prod(x.shape[3:])
        if length == 1:
            return x.reshape(1, x.shape[0], groups, k)
        return x.reshape(x.shape[0], groups, k, length).permute(0, 3, 1, 2)
    if here.merged:
        x = x.unflatten(-1, (groups, k))
    elif here.order == "groups":
        x = x.movedim(0, -2)
    lead = x.shape[:-2]
    if len(lead) == 2 and not _one_stride(x):
        return x
    return x.reshape(1, math.prod(lead), groups, k)


def _one_stride(x: Tensor) -> bool:
    """Whether the first two axes of x step through memory as one."""
    outer, inner = x.stride()[:2]
    return x.shape[0] <= 1 or x.shape[1] <= 1 or outer == inner * x.shape[1]


def unblocked(y: Tensor, layout: str, x_shape: Sequence[int]) -> Tensor:
    """y (B, L, G, N), dense in its order, as the user sees it: x's shape with N for K. A view."""
    memory = y.permute(_MEMORY[order_of(layout, x_shape)])
    return memory.view(output_shape(layout, x_shape, y.shape[2], y.shape[3]))


def result(y: Tensor, layout: str, x_shape: Sequence[int]) -> Tensor:
    """The same of kernels' y as a tensor of no base, for the user."""
    memory = y.permute(_MEMORY[order_of(layout, x_shape)])
    return as_result(memory, output_shape(layout, x_shape, y.shape[2], y.shape[3]))


def output_shape(layout: str, x_shape: Sequence[Any], groups: int, n: int) -> tuple[Any, ...]:
    """Shape of y for x of that shape; sizes may be symbolic."""
    here = LAYOUTS[layout]
    if here.order != "channels":
        return (*x_shape[:-1], groups * n if here.merged else n)
    if here.merged:
        return (x_shape[0], groups * n, *x_shape[2:])
    return (x_shape[0], groups, n, *x_shape[3:])


def empty(shape: Sequence[int], order: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised (B, L, G, features), dense in that order of memory."""
    memory = [shape[axis] for axis in _MEMORY[order]]
    return torch.empty(memory, dtype=dtype, device=like.device).permute(_AXES[order])


def dense(t: Tensor, order: str) -> Tensor:
    """t (B, L, G, features): itself if it is dense in that order of memory, else a copy."""
    return t.permute(_MEMORY[order]).contiguous().permute(_AXES[order])


def elementwise(run: Callable[..., Tensor], order: str, *tensors: Tensor) -> Tensor:
    """``run`` of tensors (B, L, G, features), its axes as that order has them in memory.

    PyTorch's gelu on a CPU has other last digits for a view of other strides (docs/facts.md).
    """
    return run(*(t.permute(_MEMORY[order]) for t in tensors)).permute(_AXES[order])


def is_dense(t: Tensor, order: str) -> bool:
    """Whether t (B, L, G, features) is dense in that order of memory."""
    return t.permute(_MEMORY[order]).is_contiguous()
