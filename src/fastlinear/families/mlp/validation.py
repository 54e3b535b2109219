"""What the arguments of mlp must satisfy, and what to say when they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.op.checks import check_backend, check_dtype, check_like, check_tensor

_NAME = "mlp"
_LISTS = "Give a list of tensors (N, K), as nn.Linear holds them, and one of biases (N,) or None."


def sequences(weights: Any, biases: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Weights and biases as tuples of one length, None for a layer without a bias."""
    if isinstance(weights, Tensor) or not hasattr(weights, "__iter__"):
        _fail("weights as a sequence of tensors, one a layer", type(weights).__name__, _LISTS)
    ws = tuple(weights)
    if not ws:
        _fail("at least one weight", "an empty sequence", _LISTS)
    if biases is None:
        return ws, (None,) * len(ws)
    if isinstance(biases, Tensor) or not hasattr(biases, "__iter__"):
        _fail(
            "biases as a sequence of tensors and None, one a layer", type(biases).__name__, _LISTS
        )
    bs = tuple(biases)
    if len(bs) != len(ws):
        _fail(
            f"one bias (or None) for each of the {len(ws)} weights",
            f"{len(bs)} biases",
            "Put None where a layer has no bias.",
        )
    return ws, bs


def validate(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
    backend: str | None = None,
    skips: Mapping[int, str] | None = None,
) -> None:
    """Raise InputError, naming the layer, unless the arguments fit each other; layers of ``skips``
    take x, too."""
    activation_of(activation, _NAME)
    activation_of(final_activation, "mlp (final_activation)")
    check_backend(_NAME, backend)
    check_tensor(_NAME, "x", x)
    check_dtype(_NAME, x)
    if x.dim() == 0:
        _fail("x of shape (..., n_0)", "a tensor without dimensions", "Give it one: x[None].")
    features, giver = x.shape[-1], f"x of shape {tuple(x.shape)}"
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        check_tensor(_NAME, f"weights[{i}]", weight, _LISTS)
        if weight.dim() != 2:
            _fail(f"weights[{i}] of shape (out, in)", f"shape {tuple(weight.shape)}", _LISTS)
        n, k = weight.shape
        if skips and i in skips:
            features, giver = features + x.shape[-1], f"{giver}, with x beside it,"
        if k != features:
            transposed = " It looks transposed: pass weight.t()." if n == features else ""
            _fail(
                f"weights[{i}] of shape (N, {features}), as {giver} gives {features} features",
                f"shape {tuple(weight.shape)}",
                f"Make its second dimension {features}.{transposed}",
            )
        check_like(_NAME, f"weights[{i}]", weight, x)
        if bias is not None:
            if not isinstance(bias, Tensor):
                _fail(f"biases[{i}] to be a tensor or None", type(bias).__name__, _LISTS)
            if bias.shape != (n,):
                _fail(
                    f"biases[{i}] of shape ({n},) for weights[{i}] of shape ({n}, {k})",
                    f"shape {tuple(bias.shape)}",
                    "Give one number per output feature, or None.",
                )
            check_like(_NAME, f"biases[{i}]", bias, x)
        features, giver = n, f"weights[{i}]"


def _fail(expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError(_NAME, expected, received, remedy)
