"""What ragged_linear accepts, said in one place."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.families.grouped.ragged.problem import NAME
from fastlinear.families.grouped.validation import check_bias, check_weight
from fastlinear.fastpath import recorder
from fastlinear.op.checks import (
    check_backend,
    check_dense,
    check_device,
    check_dtype,
    check_like,
    check_tensor,
)

BACKENDS = (BATCH_INVARIANT, "cpp", "cuda", "eager", "planes", "triton")
_INTEGERS = (torch.int32, torch.int64)


def validate(
    x: Any, weight: Any, rest: tuple[Any, Any], activation: Any, backend: Any = None
) -> None:
    """Names are known, and shapes, dtypes and devices fit; ``rest`` is group_sizes and bias.

    Raises:
        InputError: where they do not.
    """
    group_sizes, bias = rest
    activation_of(activation, NAME)
    check_backend(NAME, backend, BACKENDS)
    named = {"x": x, "weight": weight, "group_sizes": group_sizes, "bias": bias}
    for name, t in named.items():
        if name != "bias" or t is not None:
            check_tensor(NAME, name, t)
            check_dense(NAME, name, t)
    check_weight(NAME, weight)
    groups, _, k = weight.shape
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
    check_bias(NAME, weight, bias)
    check_dtype(NAME, x)
    check_like(NAME, "weight", weight, x)
    check_device(NAME, "group_sizes", group_sizes, x)
    if bias is not None:
        check_like(NAME, "bias", bias, x)


def counted(group_sizes: Tensor, rows: int) -> list[int]:
    """The sizes as the host reads them. No tape may hold what it does by them.

    Raises:
        InputError: one is negative, or their sum passes the number of rows.
    """
    if recorder.active() is not None:
        raise recorder.NotRecordable("sizes of groups, which Python reads")
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
    raise InputError(NAME, expected, received, remedy)
