"""The public function mlp."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlinear.core import deprecated
from fastlinear.dispatch.explain import Explanation
from fastlinear.families.mlp.parts import Activations, Skips, in_parts, parts_of
from fastlinear.families.mlp.spec import FRONT
from fastlinear.op.front import needs_grad as trains
from fastlinear.op.front import public

__all__ = ["call", "explain", "mlp"]

call = FRONT.call
"""(x, weights, biases, activation, final_activation, backend): the entry of ``nn.MLP``."""


@public
def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    activation: Activations = "relu",
    final_activation: str = "none",
    *,
    skips: Skips = (),
    backend: str | None = None,
    allow_fast_matmul: bool = False,
) -> Tensor:
    """A chain of linear layers as one operation: ``h_{i+1} = act_i(h_i W_iᵀ + b_i)``, ``h_0 = x``.

    Args:
        x: input, shape (..., n_0), any strides.
        weights: L tensors of shapes (n_{i+1}, n_i), as in ``nn.Linear``. Same dtype and device as
            ``x``. They are read at every call and may change between calls.
        biases: L entries of shape (n_{i+1},) or None, or None for no bias anywhere.
        activation: after every layer but the last: one name of those ``linear_act`` knows, or one
            for each of these layers.
        final_activation: after the last layer.
        skips: layers that take x again, by number from 1 on: layer i's weight is (n_{i+1}, n_i +
            n_0) there. ``{5: "first"}`` has layer 5 take cat([x, h_5]), as NeRF does, ``"last"``
            cat([h_5, x]); ``(5,)`` means ``"first"``.
        backend: force the backend by name; None lets fastlinear choose. By
            ``"batch_invariant"`` rows of the result do not depend on each other.
        allow_fast_matmul: deprecated, without effect; True warns once.

    Returns:
        Shape (..., n_L), dtype of ``x`` (under autocast: the autocast dtype). Always new memory.

    Raises:
        InputError: shapes, dtypes or devices do not fit (the message names the layer), an
            activation is unknown, or a skip is of no layer behind the first.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32 and round between
    layers, as PyTorch does. Deterministic for a given backend and shape. Differentiable, to any
    order.

    Sparse and nested tensors are computed by PyTorch's own ops where those carry them, and named in
    an InputError otherwise; quantized ones are always. On the meta device the result has its shape
    and dtype alone.

    >>> import torch, fastlinear as fl
    >>> weights = [torch.ones(4, 3), torch.ones(2, 4)]
    >>> fl.mlp(torch.ones(5, 3), weights, activation="relu").shape
    torch.Size([5, 2])

    A chain with skips, or with activations that differ, runs in parts: one operation from each
    skip or change to the next.
    """
    if allow_fast_matmul is not False:
        deprecated.fast_matmul(allow_fast_matmul, "mlp")
    if skips or not isinstance(activation, str):
        arguments = x, weights, biases, activation, final_activation, backend
        return in_parts(call, arguments, skips)
    return call(x, weights, biases, activation, final_activation, backend)  # type: ignore[no-any-return]


def by_formula(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    activation: str = "relu",
    final_activation: str = "none",
    *,
    backend: str | None = None,
    allow_fast_matmul: bool = False,
) -> Tensor:
    """``mlp``, recorded by the formula in Python rather than by a node in C++: what the backward
    reads can be looked at there. The same backends, and the same numbers."""
    arguments = x, weights, biases, activation, final_activation, backend
    return FRONT.looked_up(*arguments)  # type: ignore[no-any-return]


def explain(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    activation: Activations = "relu",
    final_activation: str = "none",
    *,
    skips: Skips = (),
    backend: str | None = None,
    allow_fast_matmul: bool = False,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``mlp`` takes for this call, why, and why not each other; of a chain that runs
    in parts for each of them.

    Args:
        x, weights, biases, activation, final_activation, skips, backend, allow_fast_matmul: as for
            ``mlp``.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    if allow_fast_matmul is not False:
        deprecated.fast_matmul(allow_fast_matmul, "explain", stacklevel=4)
    call = x, weights, biases, activation, final_activation, backend
    if skips or not isinstance(activation, str):
        if needs_grad is None:
            needs_grad = trains((x, tuple(weights), tuple(biases or ())))
        parts = [FRONT.explain(part, needs_grad) for part in parts_of(call, skips)]
        return Explanation(tuple([choice for part in parts for choice in part.choices]))
    return FRONT.explain(call, needs_grad)
