"""What layers are made of: sizes that are whole numbers, and dtypes that their ops serve."""

from __future__ import annotations

import operator
from typing import Any

import torch

from fastlinear.core.errors import InputError
from fastlinear.core.precision import DTYPE_NAMES


def check_made(function: str, dtype: Any, **sizes: Any) -> None:
    """Raise InputError unless a layer can be made so.

    Args:
        function: the class, as its messages name it.
        dtype: of the parameters; None for torch's default.
        sizes: by their names. 0 is allowed, as ``nn.Linear`` allows it.
    """
    for name, size in sizes.items():
        if not _whole(size) or size < 0:
            raise InputError(
                function,
                f"{name} to be a whole number, 0 or more",
                f"{name}={size!r}",
                f"Give a size, for example {name}=64.",
            )
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise InputError(
            function,
            f"dtype in {', '.join(map(str, DTYPE_NAMES))}",
            repr(dtype),
            "Leave it out for torch's default.",
        )


def _whole(size: Any) -> bool:
    if isinstance(size, bool | torch.Tensor):
        return False
    if isinstance(size, int | torch.SymInt):
        return True
    try:
        operator.index(size)  # NumPy's whole numbers
    except TypeError:
        return False
    return True
