"""The public function linear_act."""

from __future__ import annotations

from torch import Tensor

from fastlinear.dispatch.explain import Explanation
from fastlinear.families.linear.selection import problem_of
from fastlinear.families.linear.spec import FRONT
from fastlinear.families.linear.validation import validate
from fastlinear.op.front import public

__all__ = ["call", "explain", "linear_act", "problem_of", "validate"]

call = FRONT.call
"""(x, weight, bias, activation, backend): the entry of ``fastlinear.nn``."""


@public
def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
) -> Tensor:
    """Linear layer with its activation: ``act(x Wᵀ + b)`` as one operation where that is faster.

    Args:
        x: input, shape (..., K), any strides.
        weight: shape (N, K), as in ``nn.Linear``; any strides. Same dtype and device as ``x``.
        bias: shape (N,), or None.
        activation: by name: none, relu, silu, gelu (erf), gelu_tanh or another that the project's
            README lists.
        backend: force the forward's backend by name; None lets fastlinear choose. By
            ``"batch_invariant"`` rows of the result do not depend on each other.

    Returns:
        Shape (..., N), dtype of ``x`` (under autocast: the autocast dtype).

    Raises:
        InputError: shapes, dtypes or devices do not fit, or the activation is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and shape. Differentiable, to any order (once inside ``torch.compile``).

    Sparse and nested tensors are computed by PyTorch's own ops where those carry them, and named in
    an InputError otherwise; quantized ones are always. On the meta device the result has its shape
    and dtype alone.

    >>> import torch, fastlinear as fl
    >>> x, w, b = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(4)
    >>> fl.linear_act(x, w, b, activation="relu").shape
    torch.Size([2, 4])
    """
    return call(x, weight, bias, activation, backend)  # type: ignore[no-any-return]


def explain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``linear_act`` takes for this call, why, and why not each other.

    Args:
        x, weight, bias, activation, backend: as for ``linear_act``.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    return FRONT.explain((x, weight, bias, activation, backend), needs_grad)
