"""The readable torch-only oracle of grouped_linear: what every backend must compute.

In float64 it is the oracle; in the caller's dtype it is PyTorch's own path (backend ``eager``): one
batched product, written straight into the layout of the result where that has one.

Tensors of tokens are (B, L, G, features) views of any strides; an order says how results lie in
memory (``layout.ORDERS``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.grouped_linear import layout as layouts

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layout: str
) -> Tensor:
    """act(x_g W_gᵀ + b_g) by differentiable torch ops; x in the layout, weight (G, N, K)."""
    groups, n, k = weight.shape
    rows = layouts.blocks(x, layout, groups, k)
    pre = torch.bmm(by_group(rows), weight.transpose(1, 2))
    pre = pre.view(groups, *rows.shape[:2], n).permute(1, 2, 0, 3)  # (B, L, G, N)
    if bias is not None:
        pre = pre + bias
    y = layouts.dense(pre, layouts.order_of(layout, x.shape))
    return activation_of(activation).value(layouts.unblocked(y, layout, x.shape))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (B, L, G, K), weight (G, N, K), bias (G, N) → y (B, L, G, N), pre if asked."""
    pre = product(x, weight.transpose(1, 2), order)
    if bias is not None:
        pre += bias
    y = activation_of(activation).value(pre)
    return y, pre if save_pre else None


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
) -> Gradients:
    """(dx, dW, db), each None where not needed; dx lies in ``order``, dW and db are contiguous.

    dpre = dy · act'(pre); dx_g = dpre_g W_g; dW_g = dpre_gᵀ x_g; db_g = dpre_g summed over tokens.
    """
    dpre = dy if saved is None else activation_of(activation).backward(dy, saved)
    dx = product(dpre, weight, order) if needs[0] else None
    dw = torch.bmm(by_group(dpre).transpose(1, 2), by_group(x)) if needs[1] else None
    return dx, dw, dpre.sum((0, 1)) if needs[2] else None


def by_group(t: Tensor) -> Tensor:
    """(B, L, G, features) → (G, B·L, features): a view where the tokens have one stride."""
    batch, length, groups, features = t.shape
    return t.permute(2, 0, 1, 3).reshape(groups, batch * length, features)


def product(t: Tensor, w: Tensor, order: str) -> Tensor:
    """t (B, L, G, D) times w (G, D, E) → (B, L, G, E), dense in ``order``."""
    batch, length, groups, _ = t.shape
    out = layouts.empty((batch, length, groups, w.shape[2]), order, t, t.dtype)
    rows = out.permute(2, 0, 1, 3)
    if batch == 1 or order != "channels":
        torch.bmm(by_group(t), w, out=rows.view(groups, batch * length, w.shape[2]))
    else:
        rows.copy_(torch.bmm(by_group(t), w).view(rows.shape))
    return out
