"""The public function grouped_linear."""

from __future__ import annotations

from torch import Tensor

from fastlinear.core import calls
from fastlinear.dispatch.explain import Explanation
from fastlinear.families import linear as single
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.spec import FRONT
from fastlinear.families.grouped.validation import validate
from fastlinear.op.front import needs_grad as trains
from fastlinear.op.front import public

call = FRONT.call
"""(x, weight, bias, activation, layout, backend): the entry of ``nn.GroupedLinear``."""


@public
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    layout: str = "... (g k)",
    *,
    backend: str | None = None,
) -> Tensor:
    """Many linear layers of one size as one operation: ``y_g = act(x_g W_gᵀ + b_g)`` for every g.

    Args:
        x: input, any strides; its shape is what ``layout`` says.
        weight: shape (G, N, K): a stack of ``nn.Linear`` weights; any strides. Same dtype and
            device as ``x``.
        bias: shape (G, N), or None.
        activation: by name: none, relu, silu, gelu (erf), gelu_tanh or another that the project's
            README lists.
        layout: the shape of x, with g for G and k for K; y has the same with N for K.
            ``"... (g k)"``: (..., G·K), the groups side by side; ``"... g k"``: (..., G, K);
            ``"g ... k"``: (G, ..., K); ``"b (g k) ..."``: (B, G·K, ...), channels first, as
            ``nn.Conv1d(kernel_size=1, groups=G)`` takes it; ``"b g k ..."``: (B, G, K, ...);
            ``"... k"``: (..., K), one input for all groups, for which y is (..., G, N).
        backend: force the backend by name; None lets fastlinear choose. By
            ``"batch_invariant"`` rows of the result do not depend on each other.

    Returns:
        y in x's layout and dtype (under autocast: the autocast dtype), dense.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or a name is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and shape. Differentiable, to any order.

    Sparse, nested and quantized tensors are named in an InputError. On the meta device the result
    has its shape and dtype alone.

    >>> import torch, fastlinear as fl
    >>> x, w = torch.ones(5, 2 * 3), torch.ones(2, 4, 3)
    >>> fl.grouped_linear(x, w, activation="relu").shape
    torch.Size([5, 8])
    >>> fl.grouped_linear(x.view(5, 2, 3), w, layout="... g k").shape
    torch.Size([5, 2, 4])
    """
    return call(x, weight, bias, activation, layout, backend)  # type: ignore[no-any-return]


def explain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    layout: str = "... (g k)",
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``grouped_linear`` takes for this call, why, and why not each other.

    Args:
        x, weight, bias, activation, layout, backend: as for ``grouped_linear``. With one input for
            all groups the call is one of ``linear_act``, and that is what is explained.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    if layout != layouts.SHARED:
        return FRONT.explain((x, weight, bias, activation, layout, backend), needs_grad)
    if needs_grad is None:
        needs_grad = trains((x, weight, bias))
    if all(isinstance(t, Tensor) for t in (x, weight)) and isinstance(bias, Tensor | None):
        x, weight, bias = calls.as_autocast(x, weight, bias)
    validate(x, weight, bias, activation, layout, backend)
    flat = None if bias is None else bias.flatten()
    options = {"activation": activation, "backend": backend, "needs_grad": needs_grad}
    return single.explain(x, weight.flatten(0, 1), flat, **options)  # type: ignore[arg-type]
