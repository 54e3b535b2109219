"""The example inputs of a model: the one rule of what they may be, for every function and command.

- a tensor: the only argument;
- a tuple: the positional arguments;
- a mapping with string keys, such as a tokenizer's output: the keyword arguments;
- a pair ``(args, kwargs)`` of a tuple and a dict with string keys: both.

A list is refused, as it could be one argument or several. A model that takes a tuple and a dict as
its two positional arguments is given them as ``((t, d), {})``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fastlinear.core.errors import InputError

FORMS = (
    "a tensor, a tuple of positional arguments, a dict of keyword arguments or a pair of both "
    "(args, kwargs)"
)


def normalize_inputs(inputs: Any, function: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of a model call.

    Args:
        inputs: a tensor, a tuple of positional arguments, a dict of keyword arguments (any mapping
            with string keys) or a pair of both, ``(args, kwargs)``. Tensors may be sparse, or
            nested with the layout torch.jagged.
        function: who asks, for the error.

    Raises:
        InputError: anything else, or a nested tensor that has no sizes.

    >>> normalize_inputs((1, 2), "f")
    ((1, 2), {})
    >>> normalize_inputs(((1, 2), {"mask": None}), "f")
    ((1, 2), {'mask': None})
    """
    for v in pytree.tree_leaves(inputs):
        if isinstance(v, Tensor) and v.is_nested and v.layout is torch.strided:
            raise InputError(
                function,
                "inputs whose shapes can be asked for",
                "a nested tensor of layout torch.strided",
                "Make it with layout=torch.jagged, or pad it: "
                "torch.nested.to_padded_tensor(x, 0.0).",
            )
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if _is_pair(inputs):
        return inputs[0], dict(inputs[1])
    if isinstance(inputs, tuple):
        return inputs, {}
    if _has_names(inputs):
        return (), dict(inputs)
    received, remedy = f"an object of type {type(inputs).__name__}", "Wrap it in a tuple: (x,)."
    if isinstance(inputs, list):
        remedy = "Write ([...],) for one argument that is a list, (a, b) for several arguments."
    elif isinstance(inputs, Mapping):
        received = f"a mapping with keys that are no names: {list(inputs)[:3]}"
        remedy = "Write ({...},) for one argument that is a dict."
    raise InputError(function, f"inputs to be {FORMS}", received, remedy)


def _is_pair(inputs: Any) -> bool:
    """Whether these are positional and keyword arguments."""
    plain = type(inputs) is tuple and len(inputs) == 2 and type(inputs[0]) is tuple
    return plain and type(inputs[1]) is dict and _has_names(inputs[1])


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
