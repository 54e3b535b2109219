"""Activations by name: what PyTorch computes, and what the other dialects derive from it.

``ACTIVATIONS`` is the only list of them. C++ and CUDA sources are compiled with macros made of it;
rules of ``optimize_`` recognise an activation by its value and by torch's module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        in_place: act(pre) in pre's own memory, where torch can; the same bits as ``value``.
        module: makes torch's module of it, where there is one.
        widened: whether some device's autocast runs torch's ops of it in float32.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    saved: str
    in_place: Callable[[Tensor], Tensor] | None = None
    module: Callable[[], nn.Module] | None = None
    widened: bool = False

    def over(self, pre: Tensor) -> Tensor:
        """act(pre) for a pre that is read no more: in its memory where torch can.

        Not where torch differentiates it.
        """
        differentiated = pre.requires_grad and torch.is_grad_enabled()
        return (self.value if differentiated else self.in_place or self.value)(pre)


def _quick_gelu_backward(dy: Tensor, pre: Tensor) -> Tensor:
    s = torch.sigmoid(QUICK_GELU_SCALE * pre)
    return dy * (s * (1 + QUICK_GELU_SCALE * pre * (1 - s)))


_aten = torch.ops.aten

ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("none", lambda p: p, lambda dy, _: dy, "none", lambda p: p),
        Activation(
            "relu",
            F.relu,
            lambda dy, y: _aten.threshold_backward(dy, y, 0),
            "output",
            torch.relu_,
            nn.ReLU,
        ),
        Activation(
            "relu2",
            lambda p: F.relu(p).square(),
            lambda dy, p: _aten.threshold_backward(dy * (2 * p), p, 0),
            "pre",
            lambda p: p.relu_().mul_(p),
            widened=True,
        ),
        Activation(
            "silu",
            F.silu,
            lambda dy, p: _aten.silu_backward(dy, p),
            "pre",
            lambda p: F.silu(p, inplace=True),
            nn.SiLU,
        ),
        Activation(
            "gelu",
            F.gelu,
            lambda dy, p: _aten.gelu_backward(dy, p),
            "pre",
            lambda p: _aten.gelu.out(p, out=p),
            nn.GELU,
        ),
        Activation(
            "gelu_tanh",
            lambda p: F.gelu(p, approximate="tanh"),
            lambda dy, p: _aten.gelu_backward(dy, p, approximate="tanh"),
            "pre",
            lambda p: _aten.gelu.out(p, approximate="tanh", out=p),
            lambda: nn.GELU(approximate="tanh"),
        ),
        Activation(
            "sigmoid",
            torch.sigmoid,
            lambda dy, y: _aten.sigmoid_backward(dy, y),
            "output",
            torch.sigmoid_,
            nn.Sigmoid,
        ),
        Activation(
            "tanh",
            torch.tanh,
            lambda dy, y: _aten.tanh_backward(dy, y),
            "output",
            torch.tanh_,
            nn.Tanh,
        ),
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
            lambda p: F.leaky_relu_(p, LEAKY_RELU_SLOPE),
            lambda: nn.LeakyReLU(LEAKY_RELU_SLOPE),
        ),
        Activation("sine", torch.sin, lambda dy, p: dy * torch.cos(p), "pre", torch.sin_),
        Activation(
            "softplus",
            F.softplus,
            lambda dy, y: dy * -torch.expm1(-y),
            "output",
            lambda p: _aten.softplus.out(p, out=p),
            nn.Softplus,
            widened=True,
        ),
        Activation(
            "mish",
            F.mish,
            lambda dy, p: _aten.mish_backward(dy, p),
            "pre",
            lambda p: F.mish(p, inplace=True),
            nn.Mish,
        ),
    )
}
"""Every activation of the public surface, by name, in the order of their codes."""

NAMES: tuple[str, ...] = tuple(ACTIVATIONS)

SMOOTH = frozenset({"tanh", "sigmoid", "softplus", "sine", "silu", "quick_gelu", "gelu"})
"""Of which C++ and Triton have act' as a function of what is saved, and two derivatives by that."""
CODES: dict[str, int] = {name: code for code, name in enumerate(NAMES)}
"""The number of an activation in C++ and CUDA."""

CPP_MACRO = "FASTLINEAR_ACTIVATIONS(DO)=" + " ".join(
    f"DO({name.title().replace('_', '')},{int(ACTIVATIONS[name].saved == 'pre')})" for name in NAMES
)
"""The list for ``cpp.h``: DO(struct, whether it saves the pre-activation), by code."""


CUDA_HEADER = Path(__file__).with_name("cuda.h")


def math_of(dtype: torch.dtype) -> str:
    """How Triton evaluates activations for results of this dtype: ``MATH`` there."""
    return "exact" if dtype is torch.float32 else "fast"


def cuda_macros(form: str, activation: str = "none") -> dict[str, str | int]:
    """Macros that ``CUDA_HEADER`` reads.

    Args:
        form: how a kernel evaluates its activations, as the header lists the forms.
        activation: the kernel's own.
    """
    return {
        **{f"ACT_{name.upper()}": code for name, code in CODES.items()},
        "ACT_EACH(DO)": " ".join(f"DO(ACT_{name.upper()})" for name in NAMES[1:]),
        "ACT": f"ACT_{activation.upper()}",
        "ACT_FORM": f"FORM_{form.upper()}",
    }


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


def widened(names: Iterable[str]) -> str | None:
    """The first of these activations whose torch ops some autocast runs in float32, or None."""
    return next((name for name in names if ACTIVATIONS[name].widened), None)
