"""Linears of one list: what a rewritten parent calls in their place.

The weights stay the layers' own and are read at each call. There may be hundreds of layers that
take a microsecond each, so what is asked of every one is little.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.calls import PLAIN
from fastlinear.core.errors import InputError
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import LISTS, Way, parallel_layers
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS, is_hooked, overridden


def call_list(
    parent: nn.Module,
    home: tuple[str, ...],
    keys: tuple[str, ...],
    activation: str,
    *xs: Tensor,
) -> tuple[Tensor, ...]:
    """The linears of these keys in the list at ``home`` inside ``parent``, each on its input
    (..., K_g), each (..., N_g), with the activation behind them.

    Only while all are plain linears without hooks that take their inputs; otherwise each is called
    by itself.
    """
    layers: Any = parent
    for name in home:
        layers = layers.__dict__["_modules"][name]
    held = layers.__dict__["_modules"]
    found = None if overridden() else _parameters(held, keys)
    if found is not None and not _cast_otherwise(xs[0], activation):
        try:
            return parallel_layers(xs, [found[0]], [found[1]], way=Way((activation,), LISTS))
        except InputError:
            pass  # the layers say what is wrong, or take it
    value = activation_of(activation).value
    return tuple([value(held[key](x)) for key, x in zip(keys, xs, strict=True)])


def _parameters(held: dict[str, Any], keys: tuple[str, ...]) -> tuple[list[Any], list[Any]] | None:
    """Weights and biases; None where a layer is no plain linear, or not on plain tensors."""
    weights, biases = [], []
    for key in keys:
        layer = held.get(key)
        if type(layer) not in PLAIN_LINEARS:
            return None
        own = layer.__dict__  # type: ignore[union-attr]
        parameters = own["_parameters"]
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if is_hooked(own) or type(weight) not in PLAIN:
            return None
        if bias is None:
            if "bias" not in parameters:  # a replica of DataParallel, say
                return None
        elif type(bias) not in PLAIN:
            return None
        weights.append(weight)
        biases.append(bias)
    return weights, biases


def _cast_otherwise(x: Tensor, activation: str) -> bool:
    """Whether the operations that the activation is written in decide what autocast casts."""
    return activation_of(activation).widened and torch.is_autocast_enabled(x.device.type)
