"""The layers of a chain: their parameters, and what may not stand in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError, UnsupportedError, not_invariant
from fastlinear.core.settings import BATCH_INVARIANT, asked
from fastlinear.families.mlp.parts import beside, hidden
from fastlinear.nn.linear import Linear
from fastlinear.nn.plain_linear import hooked, why_not_linear

_OWN = ("weight", "bias")


def _registers(name: str) -> Any:
    """``nn.Module``'s way to add a hook, after which the layer is called."""

    def register(self: Layer, *args: Any, **kwargs: Any) -> Any:
        if type(self) is Layer:
            self.__class__ = CalledLayer
        return getattr(nn.Linear, name)(self, *args, **kwargs)

    return register


class Layer(nn.Linear):
    """The weight and bias of one layer. Called by nobody, as the chain runs as a whole, until it
    has a hook: then it is a ``CalledLayer``."""

    never_called = True

    register_forward_hook = _registers("register_forward_hook")
    register_forward_pre_hook = _registers("register_forward_pre_hook")
    register_backward_hook = _registers("register_backward_hook")
    register_full_backward_hook = _registers("register_full_backward_hook")
    register_full_backward_pre_hook = _registers("register_full_backward_pre_hook")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise InputError(
                "fastlinear.nn.MLP",
                "layers with the forward of their class: all of them run as one operation",
                "another forward for a layer",
                "Replace that of the MLP itself, or work on .to_sequential().",
            )
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuses what ``weight_norm``, ``spectral_norm`` and pruning add, and puts back the
        parameter they take away before."""
        taken, _, added = name.rpartition("_")
        if name in _OWN or (taken in _OWN and added == "g"):  # weight_norm's first of two
            super().register_parameter(name, param)
            return
        if taken in _OWN and taken not in self._parameters:
            self._parameters.pop(f"{taken}_g", None)
            self.__dict__.pop(taken, None)
            super().register_parameter(taken, param)  # holds the values it had
            for own in _OWN:  # in the order they had
                self._parameters[own] = self._parameters.pop(own)
        raise InputError(
            "fastlinear.nn.MLP",
            "layers of a weight and a bias: all of them run as one operation",
            f"a parameter {name!r} for a layer",
            "Use torch.nn.utils.parametrizations, or work on .to_sequential().",
        )


class CalledLayer(Layer):
    """A layer with hooks, as parallelize_module and fully_shard add them: it is called, and the
    chain runs layer by layer."""

    never_called = False


def check_layers(net: nn.Module, depth: int) -> bool:
    """Whether a layer is to be called, for its hooks.

    Raises InputError unless each child is a linear layer of the chain that does nothing else.
    """
    called = False
    for i, (name, layer) in enumerate(net._modules.items()):
        if type(layer) is CalledLayer and not hooked(layer):
            layer.__class__ = Layer  # type: ignore[assignment]
        plain = isinstance(layer, Linear) and (layer.activation, layer.backend) == ("none", None)
        hooks = isinstance(layer, Layer) and hooked(layer)
        forward = Linear.forward if plain else nn.Linear.forward
        received = None if hooks else why_not_linear(layer, forward)
        called |= hooks
        if received is None and i >= depth:
            received = "one more linear layer"
        if received is not None:
            raise InputError(
                "fastlinear.nn.MLP",
                f"{depth} linear layers and no other module as children, each of "
                "which only computes x Wᵀ + b: they run as one operation",
                f"{received} as {name!r}",
                "Keep other modules beside the MLP, or work on .to_sequential().",
            )
    return called


def by_layer(net: Any, x: Tensor) -> Tensor:
    """The chain with its layers called one after the other; x (..., n_0) → (..., n_L).

    Raises UnsupportedError where another backend than PyTorch's own is forced.
    """
    if asked(net.backend) == BATCH_INVARIANT:
        raise not_invariant("fastlinear.nn.MLP", "one of layers with hooks")
    if net.backend not in (None, "eager"):
        raise UnsupportedError(
            "fastlinear.nn.MLP",
            f"layers without hooks, which backend {net.backend!r} computes as one operation",
            "hooks on a layer",
            "Leave backend out, or remove the hooks.",
        )
    names = (*hidden(net.activation, len(net._modules)), net.final_activation)
    h = x
    for i, (layer, name) in enumerate(zip(net._modules.values(), names, strict=True)):
        entering = torch.cat(beside(x, h, net.skips[i]), -1) if i in net.skips else h
        h = activation_of(name).value(layer(entering))
    return h
