"""Linears on one input as one: what a rewritten parent calls in their place.

The weights stay the layers' own and are laid behind one another at each call. The results are
copied apart, so that each is dense and writable by itself, as that of a layer of its own is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from fastlinear.core.calls import PLAIN
from fastlinear.families.linear import linear_act
from fastlinear.rewrite.rules.grouped.modules.forward import layers_of, parameters_of
from fastlinear.rewrite.swap.forwards import overridden


def call_row(parent: nn.Module, names: Sequence[str], x: Tensor) -> tuple[Tensor, ...]:
    """The linears of these names inside ``parent`` on x (..., K), each (..., N), as one product.

    Only while all are plain linears without hooks and of one kind; otherwise each is called by
    itself.
    """
    layers = None if overridden() else layers_of(parent, names)
    ys = None if layers is None else together(x, *parameters_of(layers))
    return tuple(parent.get_submodule(name)(x) for name in names) if ys is None else ys


def together(x: Tensor, weights: Sequence[Any], biases: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """The linears (N, K) of one input as one product; None where they are not of one kind."""
    if not take(x, weights, biases):
        return None
    y = product(x, *behind_one_another(weights, biases))
    split: Any = torch.split_with_sizes_copy  # its annotation knows the call with out= alone
    return recorded(split(y, [len(w) for w in weights], -1), x, weights, biases)


def take(x: Tensor, weights: Sequence[Any], biases: Sequence[Any]) -> bool:
    """Whether linears of one kind take x; if not, they say what is wrong."""
    if not of_one_kind(weights, biases) or not x.dim() or x.shape[-1] != weights[0].shape[1]:
        return False
    autocast = torch.is_autocast_enabled(x.device.type)
    return x.device == weights[0].device and (autocast or x.dtype is weights[0].dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear_act`` as one of torch's functions: a mode of fastlinear's sees the call whole."""
    if has_torch_function_unary(x):
        y: Tensor = handle_torch_function(
            linear_act, (x,), x, weight, bias, activation="none", backend=None
        )
        return y
    return linear_act(x, weight, bias)


def recorded(
    ys: Sequence[Tensor], x: Tensor, weights: Sequence[Any], biases: Sequence[Any]
) -> tuple[Tensor, ...]:
    """The results; of frozen layers there is nothing to record."""
    if not ys[0].requires_grad or x.requires_grad:
        return tuple(ys)
    pairs = zip(ys, weights, biases, strict=True)
    return tuple(y if _trained(w, b) else y.detach() for y, w, b in pairs)


def _trained(weight: Tensor, bias: Tensor | None) -> bool:
    return weight.requires_grad or (bias is not None and bias.requires_grad)


def of_one_kind(weights: Sequence[Any], biases: Sequence[Any]) -> bool:
    """Whether weights and biases may be those of one linear. Some may have no bias."""
    first = weights[0]
    for w, b in zip(weights, biases, strict=True):
        if type(w) not in PLAIN or w.dim() != 2 or w.shape[1] != first.shape[1]:
            return False
        if w.dtype is not first.dtype or w.device != first.device:
            return False
        if b is None:
            continue
        if type(b) not in PLAIN or b.dtype is not first.dtype or b.shape != w.shape[:1]:
            return False
    return True


def behind_one_another(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of one kind as those of one linear. Where some have no bias, theirs is 0.

    Gradients reach every one of them.
    """
    weight = torch.cat(tuple(weights))
    if all(b is None for b in biases):
        return weight, None
    pairs = zip(weights, biases, strict=True)
    return weight, torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
