"""The public function diagonal_linear."""

from __future__ import annotations

from torch import Tensor

from fastlinear.dispatch.explain import Explanation
from fastlinear.families.diagonal.spec import FRONT, OUT
from fastlinear.families.diagonal.validation import validate
from fastlinear.op.front import public

__all__ = ["call", "diagonal_linear", "explain", "validate"]

call = FRONT.call
"""(x, weight, (bias, residual), activation, backend): the entry of ``fastlinear.nn``."""


@public
def diagonal_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Linear layer with a diagonal weight, in one pass: ``act(x ∘ w + b) + residual``.

    Args:
        x: input, shape (..., K), any strides.
        weight: the diagonal, shape (K,). Same dtype and device as ``x``.
        bias: shape (K,), or None.
        activation: by name: none, relu, silu, gelu (erf), gelu_tanh or another that the project's
            README lists.
        residual: added after the activation, of x's shape, or None. A scaled branch is
            ``diagonal_linear(branch, scale, residual=stream)``.
        out: contiguous tensor of x's shape to write to, sharing no memory with an input. Without
            gradients only.
        backend: force a backend by name; None lets fastlinear choose. By
            ``"batch_invariant"`` rows of the result do not depend on each other.

    Returns:
        Shape of ``x``, its dtype (under autocast the autocast dtype, plus the residual as torch
        promotes it); ``out`` where that is given.

    Raises:
        InputError: shapes, dtypes or devices do not fit, the activation is unknown, or ``out``
            cannot take the result.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes compute and sum in float32. Deterministic
    for a given backend and shape. Differentiable, to any order.

    Sparse and nested tensors are computed by PyTorch's own ops where those carry them, and named in
    an InputError otherwise; quantized ones are always. On the meta device the result has its shape
    and dtype alone.

    >>> import torch, fastlinear as fl
    >>> x, w, b = torch.ones(2, 3), torch.full((3,), 2.0), torch.ones(3)
    >>> fl.diagonal_linear(x, w, b, activation="relu", residual=x)
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    if out is None:
        return call(x, weight, (bias, residual), activation, backend)  # type: ignore[no-any-return]
    return OUT.call(x, weight, (bias, residual, out), activation, backend)  # type: ignore[no-any-return]


def explain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``diagonal_linear`` takes for this call, why, and why not each other.

    Args:
        x, weight, bias, activation, residual, backend: as for ``diagonal_linear``.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    return FRONT.explain((x, weight, (bias, residual), activation, backend), needs_grad)
