"""Between a chain and the ``nn.Sequential`` of Linear and activation modules that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

from torch import nn

from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.core.errors import InputError
from fastlinear.nn.mlp_layer import Layer
from fastlinear.nn.plain_linear import hooked, replaced_forward

_REMEDY = "An MLP is nn.Linear layers with one activation at most behind each."
_HOOKED = "Remove the hooks, or leave these layers as they are."


def shared(kind: type[nn.Linear], linear: nn.Linear) -> nn.Linear:
    """A layer of this class with the parameters of another."""
    layer = kind(
        linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
    )
    layer.weight = linear.weight
    if linear.bias is not None:
        layer.bias = linear.bias
    layer.train(linear.training)
    return layer


def read(sequential: nn.Sequential) -> tuple[list[str], list[nn.Linear], list[str]]:
    """Names and layers of a Sequential, and the activation behind each."""
    if type(sequential) is not nn.Sequential:
        _refuse("an nn.Sequential", type(sequential).__name__, _REMEDY)
    names: list[str] = []
    layers: list[nn.Linear] = []
    acts: list[str | None] = []
    for name, module in sequential._modules.items():
        if module is None:
            continue
        if replaced_forward(module):
            _refuse(
                "modules with the forward of their class",
                f"another on module {name} ({type(module).__name__})",
                "Take the model before it is rewritten, or revert that.",
            )
        if hooked(module):
            _refuse(
                "modules without hooks",
                f"hooks on module {name} ({type(module).__name__})",
                _HOOKED,
            )
        if type(module) in (nn.Linear, Layer):
            before = layers[-1].out_features if layers else module.in_features
            if module.in_features != before:
                _refuse(
                    f"module {name} to take the {before} features that the layer before gives",
                    f"module {name}: {module}",
                    _REMEDY,
                )
            names.append(name)
            layers.append(module)  # type: ignore[arg-type]
            acts.append(None)
            continue
        activation = _name(module)
        if activation is None:
            _refuse(
                "nn.Linear and activation modules only",
                f"module {name}: {module}",
                "Dropout, normalisation and the like stay outside an MLP."
                if not isinstance(module, nn.Linear)
                else "A subclass may compute something else.",
            )
        if not acts or acts[-1] is not None:
            _refuse("each activation after a Linear", f"module {name}: {module}", _REMEDY)
        acts[-1] = activation
    if hooked(sequential):
        _refuse("a Sequential without hooks", "hooks on the Sequential itself", _HOOKED)
    if not layers:
        _refuse("at least one nn.Linear", "an nn.Sequential without one", _REMEDY)
    return names, layers, [a or "none" for a in acts]


def _refuse(expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError("fastlinear.nn.MLP.from_sequential", expected, received, remedy)


@cache
def _modules() -> dict[Any, str]:
    return {_facts(a.module()): a.name for a in ACTIVATIONS.values() if a.module is not None}


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """A module's class and settings, but for whether it writes over its input."""
    names = getattr(module, "__constants__", ())
    return type(module), *(getattr(module, name) for name in names if name != "inplace")


def _name(module: nn.Module) -> str | None:
    """fastlinear's name of an activation module, or None."""
    known = {kind for kind, *_ in _modules()}
    return _modules().get(_facts(module)) if type(module) in known else None


def module_of(name: str) -> nn.Module:
    """The activation module of that name. Raises InputError where torch has none."""
    make = ACTIVATIONS[name].module
    if make is None:
        raise InputError(
            "fastlinear.nn.MLP.to_sequential",
            "an activation that torch has a module for",
            repr(name),
            f"torch has {', '.join(a.name for a in ACTIVATIONS.values() if a.module)}.",
        )
    return make()


def free_name(name: str, taken: Sequence[str]) -> str:
    """A name for the activation after layer ``name``: the next number where that is free."""
    following = str(int(name) + 1) if name.isdecimal() else f"{name}_activation"
    return following if following not in taken else f"{name}_activation"
