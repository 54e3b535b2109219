"""What the arguments of linear_act must satisfy, and what to say when they do not."""

from __future__ import annotations

from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.op.checks import check_backend, check_dtype, check_like, check_tensor

_NAME = "linear_act"


def validate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None = None,
) -> None:
    """Raise InputError unless the arguments fit each other."""
    activation_of(activation, _NAME)
    check_backend(_NAME, backend)
    given = [("x", x), ("weight", weight)] + ([] if bias is None else [("bias", bias)])
    for name, value in given:
        check_tensor(_NAME, name, value)
    if weight.dim() != 2:
        raise InputError(
            _NAME,
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
            _NAME,
            f"x of shape (..., {k}) for weight (N={n}, K={k})",
            f"shape {tuple(x.shape)}",
            f"Make x's last dimension equal weight's second.{transposed}",
        )
    if bias is not None and bias.shape != (n,):
        raise InputError(
            _NAME,
            f"bias of shape ({n},) for weight (N={n}, K={k})",
            f"shape {tuple(bias.shape)}",
            "Give one number per output feature, or None.",
        )
    check_dtype(_NAME, x)
    for name, value in given[1:]:
        check_like(_NAME, name, value, x)
