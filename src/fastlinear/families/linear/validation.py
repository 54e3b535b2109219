"""What the arguments of linear_act must satisfy, and what to say when they do not."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.tensor_kinds import conversion


def validate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None = None,
) -> None:
    """Raise InputError unless the arguments fit each other."""
    activation_of(activation, "linear_act")
    if backend is not None and not isinstance(backend, str):
        raise InputError(
            "linear_act",
            "backend to be a name or None",
            repr(backend),
            "Leave backend out to let fastlinear choose.",
        )
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(value, torch.Tensor) and not (name == "bias" and value is None):
            raise InputError(
                "linear_act",
                f"{name} to be a tensor",
                type(value).__name__,
                "Convert it, for example with torch.as_tensor.",
            )
    if weight.dim() != 2:
        raise InputError(
            "linear_act",
            "weight of shape (N, K)",
            f"shape {tuple(weight.shape)}",
            "For one weight per group use grouped linears.",
        )
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        transposed = (
            " The weight looks transposed: pass weight.t()." if x.shape[-1:] == (n,) else ""
        )
        raise InputError(
            "linear_act",
            f"x of shape (..., {k}) for weight (N={n}, K={k})",
            f"shape {tuple(x.shape)}",
            f"Make x's last dimension equal weight's second.{transposed}",
        )
    others = [("weight", weight)]
    if bias is not None:
        if bias.shape != (n,):
            raise InputError(
                "linear_act",
                f"bias of shape ({n},) for weight (N={n}, K={k})",
                f"shape {tuple(bias.shape)}",
                "Give one number per output feature, or None.",
            )
        others.append(("bias", bias))
    if x.dtype not in DTYPE_NAMES:
        raise InputError(
            "linear_act",
            f"a dtype in {', '.join(DTYPE_NAMES.values())}",
            str(x.dtype),
            conversion("x", x, "Convert the input, for example x.float()."),
        )
    for name, value in others:
        if value.dtype != x.dtype:
            raise InputError(
                "linear_act",
                f"{name} of x's dtype {x.dtype}",
                str(value.dtype),
                conversion(name, value, "Convert one of them, or use torch.autocast."),
            )
        if value.device != x.device:
            raise InputError(
                "linear_act",
                f"{name} on x's device {x.device}",
                str(value.device),
                f"Move it: {name}.to({str(x.device)!r}).",
            )
