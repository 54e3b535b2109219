"""What unequal_linear accepts, said in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.families.grouped.unequal.problem import NAME
from fastlinear.op.checks import check_backend, check_dense, check_dtype, check_tensor

BACKENDS = (BATCH_INVARIANT, "eager", "together")
Maybe = Sequence[Tensor | None]


def validate(
    xs: Sequence[Any],
    weights: Sequence[Any],
    biases: Sequence[Any] | None,
    activation: Any,
    backend: Any = None,
) -> None:
    """Names are known, and lists, shapes, dtypes and devices fit.

    Raises:
        InputError: where they do not.
    """
    activation_of(activation, NAME)
    check_backend(NAME, backend, BACKENDS)
    held: Sequence[Any] = (None,) * len(xs) if biases is None else biases
    if not len(xs) == len(weights) == len(held):
        received = f"{len(xs)} inputs, {len(weights)} weights, {len(held)} biases"
        fail("as many inputs as weights and biases", received, "Pass one of each a group.")
    for name, tensors in (("input", xs), ("weight", weights), ("bias", held)):
        for g, t in enumerate(tensors):
            if t is not None or name != "bias":
                _check_tensor(f"{name} {g}", t)
    if xs:
        _check_groups(xs, weights, held)


def _check_groups(xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Maybe) -> None:
    first = xs[0]
    check_dtype(NAME, first, "input 0")
    dtype, device = first.dtype, first.device
    for g, (x, w, b) in enumerate(zip(xs, weights, biases, strict=True)):
        fits = w.dim() == 2 and x.shape[-1:] == w.shape[1:]
        if fits and (b is None or b.shape == w.shape[:1]):
            given = (x, w) if b is None else (x, w, b)
            if all(t.dtype is dtype and t.device == device for t in given):
                continue
        _refuse(g, x, w, b, first)


def _check_tensor(name: str, t: Any) -> None:
    check_tensor(NAME, name, t)
    # a loop of PyTorch's own linears takes sparse weights and jagged inputs
    if name.startswith("bias") or (t.is_nested and t.layout is torch.strided):
        check_dense(NAME, name, t)


def _refuse(g: int, x: Tensor, w: Tensor, b: Tensor | None, first: Tensor) -> NoReturn:
    """Say what is wrong with a group."""
    if w.dim() != 2:
        fail(f"weight {g} of shape (N, K)", f"shape {tuple(w.shape)}", "Reshape it.")
    if x.dim() < 1 or x.shape[-1] != w.shape[1]:
        fail(
            f"input {g} with {w.shape[1]} features in its last dimension, as weight {g} has",
            f"shape {tuple(x.shape)}",
            "Check the order of the lists.",
        )
    if b is not None and b.shape != (w.shape[0],):
        fail(
            f"bias {g} of shape ({w.shape[0]},)",
            f"shape {tuple(b.shape)}",
            "Give one number per output feature, or None.",
        )
    named = {"input": x, "weight": w, **({} if b is None else {"bias": b})}
    like = first.dtype, first.device
    name, t = next((n, t) for n, t in named.items() if (t.dtype, t.device) != like)
    fail(
        f"{name} {g} of dtype {first.dtype} on {first.device}, as input 0 is",
        f"{t.dtype} on {t.device}",
        "Convert or move it, or use torch.autocast.",
    )


def fail(expected: str, received: str, remedy: str) -> NoReturn:
    """Raise what a call that does not fit gets."""
    raise InputError(NAME, expected, received, remedy)
