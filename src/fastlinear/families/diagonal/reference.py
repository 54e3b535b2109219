"""The readable torch-only oracle of diagonal_linear: what every backend must compute.

In float64 it is the oracle; in the caller's dtype it is PyTorch's own path (backend ``eager``), but
for float16 on a CPU, which computes in float32 and rounds once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """act(x ∘ w + b) + r by PyTorch's ops as a model writes them, which round 16-bit dtypes at
    every step; x and r (..., K), weight and bias (K,)."""
    y = activated(x * weight if bias is None else x * weight + bias, activation)
    return y if residual is None else residual + y


def diagonal_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """The same, differentiable as well; float16 on a CPU in float32, rounded once."""
    if not widens(x):
        return by_torch(x, weight, bias, activation, residual)
    b = None if bias is None else bias.float()
    if residual is None or residual.dtype is x.dtype:
        r = None if residual is None else residual.float()
        return by_torch(x.float(), weight.float(), b, activation, r).to(x.dtype)
    y = by_torch(x.float(), weight.float(), b, activation, None).to(x.dtype)
    return residual + y  # as torch promotes


def widens(x: Tensor) -> bool:
    """Whether calls on x compute in float32: float16 on a CPU, whose range, up to 65504, a product
    or an activation's derivative leaves where the result does not."""
    return x.dtype is torch.float16 and x.device.type == "cpu"


def activated(pre: Tensor, activation: str) -> Tensor:
    """act(pre), of any shape."""
    return activation_of(activation).value(pre)


def rounded(grads: Gradients, dtype: torch.dtype) -> Gradients:
    """The gradients in a narrower dtype."""
    dx, dw, db = (None if g is None else g.to(dtype) for g in grads)
    return dx, dw, db


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
    if widens(dy):
        x, weight, bias = (None if t is None else t.float() for t in (x, weight, bias))
        dx, dw, db = _backward(dy.float(), x, weight, bias, activation, needs)
        return rounded((dx, dw, db), dy.dtype)
    return _backward(dy, x, weight, bias, activation, needs)


def _backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    needs: Needs,
) -> Gradients:
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
