"""The readable torch-only oracle of diagonal_linear: what every backend must compute.

In float64 it is the oracle; in the caller's dtype it is PyTorch's own path (backend ``eager``).
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.ops.common.activations import activation as activation_of

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def diagonal_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """act(x ∘ w + b) + r by differentiable torch ops; x and r (..., K), weight and bias (K,)."""
    y = activated(x * weight if bias is None else x * weight + bias, activation)
    return y if residual is None else residual + y


def activated(pre: Tensor, activation: str) -> Tensor:
    """act(pre), of any shape."""
    return activation_of(activation).value(pre)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """y (M, K), in ``out`` if that is given: x, residual and out (M, K), weight and bias (K,)."""
    y = diagonal_linear(x, weight, bias, activation, residual)
    return y if out is None else out.copy_(y)


def backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    needs: Needs,
) -> Gradients:
    """(dx, dw, db), each None where not needed: dy and x (M, K) → (M, K), (K,), (K,).

    The gradient of the residual is dy itself. Without an activation x may be None where dw is not
    needed, weight where dx is not, and bias always.
    """
    dpre = dy
    if activation != "none":
        assert x is not None
        assert weight is not None
        act = activation_of(activation)
        pre = x * weight if bias is None else x * weight + bias
        dpre = act.backward(dy, act.value(pre) if act.saved == "output" else pre)
    dx = dpre * weight if needs[0] and weight is not None else None
    dw = (dpre * x).sum(0) if needs[1] and x is not None else None
    return dx, dw, dpre.sum(0) if needs[2] else None
