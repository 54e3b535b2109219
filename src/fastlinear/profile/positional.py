"""Calls of torch's functions with the tensors they are given by name put where they stand by
position: ``torch.chunk(input=x, chunks=2)`` as ``torch.chunk(x, chunks=2)``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FIRST = ("input", "tensor", "tensors", "self")
_SECOND = "other"
_HOMES = (torch, F, torch.special, Tensor)


def positional(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of one of torch's functions, with its first one or two tensors first;
    of any other function as they are."""
    if not kwargs or not is_torchs(function):
        return args, kwargs
    rest = dict(kwargs)
    if not args:
        name = next((n for n in _FIRST if n in rest), None)
        if name is None:
            return args, kwargs
        args = (rest.pop(name),)
    if len(args) == 1 and _SECOND in rest:
        args = (*args, rest.pop(_SECOND))
    return args, rest


def is_torchs(function: Any) -> bool:
    """Whether it is a function, or the name of a method of tensors, that torch calls so."""
    if isinstance(function, str):
        return hasattr(Tensor, function)
    name = getattr(function, "__name__", "")
    return any(getattr(home, name, None) is function for home in _HOMES)
