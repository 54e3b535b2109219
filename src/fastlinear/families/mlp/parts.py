"""Chains whose later layers take the input again, or whose hidden activations differ.

Such a chain runs in parts, each a call of its own: of layers with one activation but for the last
of them, each of which takes what the one before gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.calls import PLAIN, is_captured
from fastlinear.core.errors import InputError
from fastlinear.dispatch.backend import is_installed
from fastlinear.families.linear.padded_problem import row_length
from fastlinear.families.mlp.validation import sequences, validate
from fastlinear.op.spec import Arguments

Skips = Mapping[int, str] | Collection[int]
"""Numbers of layers, from 1 on, and where each takes the input: ``"first"``, before what the layer
below gives, as NeRF does, or ``"last"``. Of numbers alone all are ``"first"``."""
Activations = str | list[str] | tuple[str, ...]
"""One name for all hidden layers, or one for each."""
FIRST, LAST = "first", "last"
_LEAST_BYTES = 10_000_000
"""Of what is joined: the host takes 15 to 20 us more for a join than for PyTorch's concatenation,
which an H200 makes up for from there on. A CUDA graph has no host in it."""
_SKIPS = 'Give {5: "first"} for a layer 5 that takes cat([x, h]), {5: "last"} for cat([h, x]).'
_NAMES = "Give one name for all, or one for each layer but the last."


def placed(skips: Skips, layers: int, function: str = "mlp") -> dict[int, str]:
    """Where each layer takes the input, in the order of the layers.

    Raises InputError, of ``function``, for a layer there is not and an unknown place.
    """
    given: Any = skips
    if isinstance(given, str) or not isinstance(given, Collection):
        raise InputError(function, "skips as numbers of layers", repr(skips), _SKIPS)
    each = given.items() if isinstance(given, Mapping) else ((layer, FIRST) for layer in given)
    found = {}
    for layer, place in each:
        if type(layer) is not int or not 0 < layer < layers:
            expected = f"skips of layers behind the first, the last of which is {layers - 1}"
            raise InputError(function, expected, repr(layer), _SKIPS)
        if place not in (FIRST, LAST):
            expected = f'skips[{layer}] "{FIRST}" or "{LAST}"'
            raise InputError(function, expected, repr(place), _SKIPS)
        found[layer] = place
    return dict(sorted(found.items()))


def hidden(activation: Activations, layers: int, function: str = "mlp") -> tuple[str, ...]:
    """The activation behind each layer but the last.

    Raises InputError, of ``function``, for an unknown one, and unless there is one for each.
    """
    several = isinstance(activation, (list, tuple))
    names: tuple[str, ...] = tuple(activation) if several else (activation,)  # type: ignore[assignment]
    for name in names:
        activation_of(name, function)
    if not several:
        return names * (layers - 1)
    if len(names) != layers - 1:
        expected = f"one activation, or {layers - 1} for the {layers - 1} hidden layers"
        raise InputError(function, expected, f"{len(names)} activations", _NAMES)
    return names


def beside(x: Tensor, h: Tensor, place: str) -> tuple[Tensor, ...]:
    """x and h, in the order of a layer with a skip."""
    return (x, h) if place == FIRST else (h, x)


def joined(x: Tensor, h: Tensor, place: str) -> Tensor:
    """What a layer with a skip takes: x (..., n_0) beside h (..., n).

    On a GPU many rows begin on 16 bytes, but for float64 and where dtypes differ.
    """
    both = beside(x, h, place)
    plain = type(x) in PLAIN and type(h) in PLAIN
    if not (plain and h.is_cuda and x.dtype is h.dtype is not torch.float64):
        return torch.cat(both, -1)
    n = x.shape[-1] + h.shape[-1]
    if not torch.compiler.is_compiling():
        large = h.shape[:-1].numel() * n * h.itemsize >= _LEAST_BYTES
        return _join()(*both) if large or is_captured(h) else torch.cat(both, -1)
    if more := row_length(n, h.itemsize) - n:
        both += (h.new_zeros(*h.shape[:-1], more),)
    return torch.cat(both, -1)[..., :n]


@cache
def _join() -> Callable[[Tensor, Tensor], Tensor]:
    """How matrices on a GPU come side by side."""
    if is_installed("triton"):
        from fastlinear.families.mlp.join import join

        return join
    return lambda a, b: torch.cat((a, b), -1)


def parts(names: Sequence[str], skips: Collection[int]) -> list[tuple[int, int]]:
    """The first layer of each part and the first one behind it, of a chain with these activations
    behind all its layers."""
    found, begin = [], 0
    for end in range(1, len(names) + 1):
        if end == len(names) or end in skips or names[end - 1] != names[begin]:
            found.append((begin, end))
            begin = end
    return found


def in_parts(call: Callable[..., Tensor], arguments: Arguments, skips: Skips) -> Tensor:
    """``call`` of the ``arguments`` of mlp, once a part; their activation may be a sequence."""
    x, weights, biases, activation, final_activation, backend = arguments
    weights, biases = sequences(weights, biases)
    places = placed(skips, len(weights))
    names = (*hidden(activation, len(weights)), final_activation)
    h = x
    try:
        for begin, end in parts(names, places):
            entering = joined(x, h, places[begin]) if begin in places else h
            layers = weights[begin:end], biases[begin:end]
            h = call(entering, *layers, names[begin], names[end - 1], backend)
    except InputError:  # of a part, whose layers are numbered from its first on
        validate(x, weights, biases, final_activation, final_activation, backend, places)
        raise
    return h


def parts_of(arguments: Arguments, skips: Skips) -> list[Arguments]:
    """The calls that ``in_parts`` makes, whose x have nothing but the right shape and kind."""
    made: list[Arguments] = []

    def call(entering: Tensor, weights: tuple[Tensor, ...], *others: Any) -> Tensor:
        made.append((entering, weights, *others))
        return entering.new_empty(*entering.shape[:-1], weights[-1].shape[0])

    in_parts(call, arguments, skips)
    return made
