"""What the arguments of grouped_linear must satisfy, and what to say when they do not."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.tensor_kinds import REMEDY, conversion, unlike_strided
from fastlinear.families.grouped.layout import LAYOUTS, NAMES, SHARED, features_of


def validate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    backend: str | None = None,
) -> None:
    """Raise InputError unless the arguments fit each other."""
    activation_of(activation, "grouped_linear")
    if not isinstance(layout, str) or layout not in NAMES:
        _fail(
            f"layout in {', '.join(map(repr, NAMES))}",
            repr(layout),
            "It names x's dimensions: g groups, k features, b batch, ... any others.",
        )
    if backend is not None and not isinstance(backend, str):
        _fail(
            "backend to be a name or None", repr(backend), "Leave it out to let fastlinear choose."
        )
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            remedy = "Convert it, for example with torch.as_tensor."
            if name == "weight" and isinstance(value, (list, tuple)):
                remedy = "Stack weights of equal shape: torch.stack(weights)."
            _fail(f"{name} to be a tensor", type(value).__name__, remedy)
        if isinstance(value, Tensor) and not (name == "x" and layout == SHARED):
            _check_strided(name, value)
    if layout == SHARED and x.is_nested and x.layout is torch.strided:
        _check_strided("x", x)  # PyTorch's linear takes other kinds
    if weight.dim() != 3 or weight.shape[0] == 0:
        _fail(
            "weight of shape (G, N, K) with at least one group",
            f"shape {tuple(weight.shape)}",
            "Stack the groups' weights (N, K): torch.stack(weights).",
        )
    _validate_x(x, weight, layout)
    groups, n, _ = weight.shape
    others = [("weight", weight)]
    if bias is not None:
        if bias.shape != (groups, n):
            _fail(
                f"bias of shape ({groups}, {n}) for weight of shape {tuple(weight.shape)}",
                f"shape {tuple(bias.shape)}",
                "Give one number per group and output feature, or None.",
            )
        others.append(("bias", bias))
    if x.dtype not in DTYPE_NAMES:
        _fail(
            f"a dtype in {', '.join(DTYPE_NAMES.values())}",
            str(x.dtype),
            conversion("x", x, "Convert the input, for example x.float()."),
        )
    for name, value in others:
        if value.dtype != x.dtype:
            _fail(
                f"{name} of x's dtype {x.dtype}",
                str(value.dtype),
                conversion(name, value, "Convert one of them, or use torch.autocast."),
            )
        if value.device != x.device:
            _fail(
                f"{name} on x's device {x.device}",
                str(value.device),
                f"Move it: {name}.to({str(x.device)!r}).",
            )


def _check_strided(name: str, value: Tensor) -> None:
    unlike = unlike_strided(value)
    if unlike is not None:
        _fail(f"{name} to be a dense tensor", unlike, REMEDY)


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
    raise InputError("grouped_linear", expected, received, remedy)
