"""Checks of arguments that families share. Each raises InputError in the name of ``function``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.errors import InputError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.tensor_kinds import REMEDY, conversion, unlike_strided


def check_backend(function: str, backend: Any, names: Sequence[str] = ()) -> None:
    """A forced backend is a name, and one of ``names`` where these are given."""
    if backend is None or (backend in names if names else isinstance(backend, str)):
        return
    expected = f"backend in {', '.join(names)} or None" if names else "backend to be a name or None"
    remedy = "Leave backend out to let fastlinear choose."
    raise InputError(function, expected, repr(backend), remedy)


def check_tensor(function: str, name: str, value: Any, remedy: str | None = None) -> None:
    """An argument is a tensor."""
    if not isinstance(value, Tensor):
        remedy = remedy or "Convert it, for example with torch.as_tensor."
        raise InputError(function, f"{name} to be a tensor", type(value).__name__, remedy)


def check_dense(function: str, name: str, value: Tensor) -> None:
    """A tensor is neither sparse nor nested."""
    unlike = unlike_strided(value)
    if unlike is not None:
        raise InputError(function, f"{name} to be a dense tensor", unlike, REMEDY)


def check_dtype(function: str, x: Tensor, name: str = "x") -> None:
    """The input's dtype is served."""
    if x.dtype not in DTYPE_NAMES:
        expected = f"{name} of a dtype in {', '.join(DTYPE_NAMES.values())}"
        remedy = conversion(name, x, f"Convert the input, for example {name}.float().")
        raise InputError(function, expected, str(x.dtype), remedy)


def check_like(function: str, name: str, value: Tensor, x: Tensor) -> None:
    """A tensor has x's dtype, and lies on its device."""
    if value.dtype != x.dtype:
        remedy = conversion(name, value, "Convert one of them, or use torch.autocast.")
        raise InputError(function, f"{name} of x's dtype {x.dtype}", str(value.dtype), remedy)
    check_device(function, name, value, x)


def check_device(function: str, name: str, value: Tensor, x: Tensor) -> None:
    """A tensor lies on x's device."""
    if value.device != x.device:
        remedy = f"Move it: {name}.to({str(torch.device(x.device))!r})."
        raise InputError(function, f"{name} on x's device {x.device}", str(value.device), remedy)
