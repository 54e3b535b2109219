"""Activations by name: value, derivative, and what the derivative is computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.errors import InputError

LEAKY_RELU_SLOPE = 0.01
QUICK_GELU_SCALE = 1.702


@dataclass(frozen=True)
class Activation:
    """One elementwise activation.

    Attributes:
        name: the public name.
        value: act(pre), built from differentiable torch ops.
        backward: (dy, saved) → dy * act'(pre), in one pass where torch has a fused op.
        saved: what ``backward`` reads: ``"none"``, ``"output"`` or ``"pre"``.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    saved: str


def _quick_gelu_backward(dy: Tensor, pre: Tensor) -> Tensor:
    s = torch.sigmoid(QUICK_GELU_SCALE * pre)
    return dy * (s * (1 + QUICK_GELU_SCALE * pre * (1 - s)))


_aten = torch.ops.aten

ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("none", lambda p: p, lambda dy, _: dy, "none"),
        Activation("relu", F.relu, lambda dy, y: _aten.threshold_backward(dy, y, 0), "output"),
        Activation(
            "relu2",
            lambda p: F.relu(p).square(),
            lambda dy, p: _aten.threshold_backward(dy * (2 * p), p, 0),
            "pre",
        ),
        Activation("silu", F.silu, lambda dy, p: _aten.silu_backward(dy, p), "pre"),
        Activation("gelu", F.gelu, lambda dy, p: _aten.gelu_backward(dy, p), "pre"),
        Activation(
            "gelu_tanh",
            lambda p: F.gelu(p, approximate="tanh"),
            lambda dy, p: _aten.gelu_backward(dy, p, approximate="tanh"),
            "pre",
        ),
        Activation("sigmoid", torch.sigmoid, lambda dy, y: _aten.sigmoid_backward(dy, y), "output"),
        Activation("tanh", torch.tanh, lambda dy, y: _aten.tanh_backward(dy, y), "output"),
        Activation(
            "quick_gelu",
            lambda p: p * torch.sigmoid(QUICK_GELU_SCALE * p),
            _quick_gelu_backward,
            "pre",
        ),
        Activation(
            "leaky_relu",
            lambda p: F.leaky_relu(p, LEAKY_RELU_SLOPE),
            lambda dy, y: _aten.leaky_relu_backward(dy, y, LEAKY_RELU_SLOPE, True),
            "output",
        ),
    )
}
"""Every activation of the public surface, by name."""

NAMES: tuple[str, ...] = tuple(ACTIVATIONS)


_APPLY_IT = "For any other, take none and apply it to the result."


def activation(name: str, function: str = "activation", remedy: str = _APPLY_IT) -> Activation:
    """The activation of that name. Raises InputError naming the known ones."""
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        raise InputError(
            function,
            f"activation in {', '.join(NAMES)}",
            repr(name),
            remedy,
        ) from None
