"""What ragged_linear accepts, said in one place."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.tensor_kinds import REMEDY, conversion, unlike_strided

BACKENDS = ("cpp", "eager", "triton")
_INTEGERS = (torch.int32, torch.int64)


def validate(
    x: Any, weight: Any, rest: tuple[Any, Any], activation: Any, backend: Any = None
) -> None:
    """Names are known, and shapes, dtypes and devices fit; ``rest`` is group_sizes and bias.

    Raises:
        InputError: where they do not.
    """
    group_sizes, bias = rest
    activation_of(activation, "ragged_linear")
    if backend is not None and backend not in BACKENDS:
        fail(f"backend in {', '.join(BACKENDS)} or None", repr(backend), "Leave it out.")
    named = {"x": x, "weight": weight, "group_sizes": group_sizes, "bias": bias}
    for name, t in named.items():
        if t is None and name == "bias":
            continue
        if not isinstance(t, Tensor):
            fail(f"{name} to be a tensor", type(t).__name__, "Convert it with torch.as_tensor.")
        unlike = unlike_strided(t)
        if unlike is not None:
            fail(f"{name} to be a dense tensor", unlike, REMEDY)
    if weight.dim() != 3 or weight.shape[0] == 0:
        fail(
            "weight of shape (G, N, K) with at least one group",
            f"shape {tuple(weight.shape)}",
            "Stack the groups' weights (N, K): torch.stack(weights).",
        )
    groups, n, k = weight.shape
    if x.dim() != 2 or x.shape[1] != k:
        fail(
            f"x of shape (T, {k}) for weight of shape {tuple(weight.shape)}",
            f"shape {tuple(x.shape)}",
            "Flatten its tokens: x.flatten(0, -2).",
        )
    if group_sizes.shape != (groups,) or group_sizes.dtype not in _INTEGERS:
        fail(
            f"group_sizes of shape ({groups},), int32 or int64",
            f"shape {tuple(group_sizes.shape)}, {group_sizes.dtype}",
            "Give the number of rows of each group.",
        )
    if bias is not None and bias.shape != (groups, n):
        fail(
            f"bias of shape ({groups}, {n})",
            f"shape {tuple(bias.shape)}",
            "Give one number per group and output feature, or None.",
        )
    if x.dtype not in DTYPE_NAMES:
        fail(f"a dtype in {', '.join(DTYPE_NAMES.values())}", str(x.dtype), "Convert the input.")
    for name, t in (("weight", weight), ("bias", bias), ("group_sizes", group_sizes)):
        if t is None:
            continue
        if t.device != x.device:
            fail(f"{name} on {x.device}", str(t.device), f"Move it: {name}.to(x.device).")
        if t is not group_sizes and t.dtype is not x.dtype:
            fail(
                f"{name} of x's dtype {x.dtype}",
                str(t.dtype),
                conversion(name, t, "Convert one of them, or use torch.autocast."),
            )


def counted(group_sizes: Tensor, rows: int) -> list[int]:
    """The sizes as the host reads them.

    Raises:
        InputError: one is negative, or their sum passes the number of rows.
    """
    sizes: list[int] = group_sizes.tolist()
    total = sum(sizes)
    if min(sizes) < 0 or total > rows:
        fail(
            f"group_sizes of at least 0 that sum to at most the {rows} rows of x "
            "(where they sum to less, the rows behind give zeros)",
            f"least {min(sizes)}, sum {total}",
            "Count the rows of each group, for example with torch.bincount.",
        )
    return sizes


def fail(expected: str, received: str, remedy: str) -> NoReturn:
    """Raise what a call that does not fit gets."""
    raise InputError("ragged_linear", expected, received, remedy)
