"""What the arguments of grouped_linear must satisfy, and what to say when they do not."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.families.grouped.layout import LAYOUTS, NAMES, SHARED, features_of
from fastlinear.families.grouped.problem import NAME
from fastlinear.op.checks import (
    check_backend,
    check_dense,
    check_dtype,
    check_like,
    check_tensor,
)

_STACK = "Stack weights of equal shape: torch.stack(weights)."


def validate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    backend: str | None = None,
) -> None:
    """Raise InputError unless the arguments fit each other."""
    activation_of(activation, NAME)
    if not isinstance(layout, str) or layout not in NAMES:
        _fail(
            f"layout in {', '.join(map(repr, NAMES))}",
            repr(layout),
            "It names x's dimensions: g groups, k features, b batch, ... any others.",
        )
    check_backend(NAME, backend)
    given = [("x", x), ("weight", weight)] + ([] if bias is None else [("bias", bias)])
    for name, value in given:
        listed = name == "weight" and isinstance(value, (list, tuple))
        check_tensor(NAME, name, value, _STACK if listed else None)
        if not (name == "x" and layout == SHARED):
            check_dense(NAME, name, value)
    if layout == SHARED and x.is_nested and x.layout is torch.strided:
        check_dense(NAME, "x", x)  # PyTorch's linear takes other kinds
    check_weight(NAME, weight)
    _validate_x(x, weight, layout)
    check_bias(NAME, weight, bias)
    check_dtype(NAME, x)
    for name, value in given[1:]:
        check_like(NAME, name, value, x)


def check_weight(function: str, weight: Tensor) -> None:
    """Raise InputError unless a weight has the shape (G, N, K)."""
    if weight.dim() != 3 or weight.shape[0] == 0:
        raise InputError(
            function,
            "weight of shape (G, N, K) with at least one group",
            f"shape {tuple(weight.shape)}",
            "Stack the groups' weights (N, K): torch.stack(weights).",
        )


def check_bias(function: str, weight: Tensor, bias: Tensor | None) -> None:
    """Raise InputError unless a bias fits a weight (G, N, K)."""
    groups, n, _ = weight.shape
    if bias is not None and bias.shape != (groups, n):
        raise InputError(
            function,
            f"bias of shape ({groups}, {n}) for weight of shape {tuple(weight.shape)}",
            f"shape {tuple(bias.shape)}",
            "Give one number per group and output feature, or None.",
        )


def _validate_x(x: Tensor, weight: Tensor, layout: str) -> None:
    groups, n, k = weight.shape
    least = 1 if layout == SHARED else LAYOUTS[layout].least
    if x.dim() < least:
        _fail(
            f"x of at least {least} dimensions for layout {layout!r}",
            f"shape {tuple(x.shape)}",
            "Add the missing dimensions, or name another layout.",
        )
    found: tuple[int, ...] = (x.shape[-1],)
    wanted: tuple[int, ...] = (k,)
    if layout != SHARED:
        merged = LAYOUTS[layout].merged
        found, wanted = features_of(x.shape, layout), (groups * k,) if merged else (groups, k)
    if found == wanted:
        return
    fitting = [
        repr(name)
        for name, other in LAYOUTS.items()
        if name != layout
        and x.dim() >= other.least
        and features_of(x.shape, name) == ((groups * k,) if other.merged else (groups, k))
    ]
    remedy = "Make x fit the weight, or the weight x."
    if fitting:
        remedy = f"x fits layout {' or '.join(fitting)}."
    elif k != n and _transposed(weight, layout) == found:
        remedy = "The weight looks transposed: pass weight.transpose(1, 2)."
    sizes = f"{groups * k} = G·K" if len(wanted) == 1 and layout != SHARED else _named(wanted)
    _fail(
        f"x with {sizes} features in layout {layout!r} for weight (G={groups}, N={n}, K={k})",
        f"shape {tuple(x.shape)}",
        remedy,
    )


def _transposed(weight: Tensor, layout: str) -> tuple[int, ...]:
    """What ``features_of`` would have to be if the weight were (G, K, N)."""
    groups, n, _ = weight.shape
    if layout == SHARED:
        return (n,)
    return (groups * n,) if LAYOUTS[layout].merged else (groups, n)


def _named(wanted: tuple[int, ...]) -> str:
    return f"{wanted[0]} groups of {wanted[1]}" if len(wanted) == 2 else str(wanted[0])


def _fail(expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError(NAME, expected, received, remedy)
