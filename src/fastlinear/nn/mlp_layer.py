"""The layers of a chain: their parameters, and what may not stand in their place."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from fastlinear.core.errors import InputError
from fastlinear.nn.linear import Linear
from fastlinear.nn.plain_linear import why_not_linear

_OWN = ("weight", "bias")


class Layer(nn.Linear):
    """The weight and bias of one layer. Called by nobody: the chain runs as a whole."""

    never_called = True

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            "fastlinear.nn.MLP",
            "no hooks on single layers: all of them run as one operation",
            "a hook on a layer",
            "Hook the MLP itself, or work on .to_sequential().",
        )

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook

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


def check_layers(net: nn.Module, depth: int) -> None:
    """Raise unless each child is a linear layer of the chain that does nothing else."""
    for i, (name, layer) in enumerate(net._modules.items()):
        plain = isinstance(layer, Linear) and (layer.activation, layer.backend) == ("none", None)
        received = why_not_linear(layer, Linear.forward if plain else nn.Linear.forward)
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
