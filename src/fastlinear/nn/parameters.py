"""Reading a layer's parameters at every call."""

from __future__ import annotations

from typing import Any

from torch import nn


def weight_and_bias(module: nn.Module) -> tuple[Any, Any]:
    """The weight, and the bias or None; what a parametrization computes where it holds one.

    ``nn.Module``'s own attribute look-up takes half a microsecond each.
    """
    held = module._parameters
    try:
        return held["weight"], held["bias"]
    except KeyError:
        return module.weight, module.bias
