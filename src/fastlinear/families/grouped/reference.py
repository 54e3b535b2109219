"""The readable torch-only oracle of grouped_linear: what every backend must compute.

In float64 it is the oracle; in the caller's dtype it is PyTorch's own path (backend ``eager``): one
batched product, on a GPU written straight into the layout of the result.

Tensors of tokens are (B, L, G, features) views of any strides; an order says how results lie in
memory (``layout.ORDERS``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.grouped import layout as layouts

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layout: str
) -> Tensor:
    """act(x_g W_gᵀ + b_g) by differentiable torch ops; x in the layout, weight (G, N, K)."""
    groups, n, k = weight.shape
    rows = layouts.blocks(x, layout, groups, k)
    flat, w = by_group(rows), weight.transpose(1, 2)
    pre = torch.bmm(flat, w) if bias is None else _plus(bias, flat, w)
    order = layouts.order_of(layout, x.shape)
    if order != "groups":
        pre = layouts.dense(pre.view(groups, *rows.shape[:2], n).permute(1, 2, 0, 3), order)
        return activation_of(activation).value(layouts.unblocked(pre, layout, x.shape))
    return activation_of(activation).value(pre.view(groups, *x.shape[1:-1], n))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (B, L, G, K), weight (G, N, K), bias (G, N) → y (B, L, G, N), pre if asked."""
    pre = product(x, weight.transpose(1, 2), order, bias)
    return activated(pre, activation, save_pre, order)


def activated(
    pre: Tensor, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """(act(pre), pre if asked); pre's own memory is used where it is free, which on a CPU saves the
    most time."""
    act = activation_of(activation)
    run = act.value if save_pre else act.over
    return layouts.elementwise(run, order, pre), pre if save_pre else None


def differentiated(dy: Tensor, saved: Tensor | None, activation: str, order: str) -> Tensor:
    """dpre = dy · act'(pre), of what the activation keeps."""
    if saved is None:
        return dy
    return layouts.elementwise(activation_of(activation).backward, order, dy, saved)


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

    dx_g = dpre_g W_g; dW_g = dpre_gᵀ x_g; db_g = dpre_g summed over tokens.
    """
    dpre = differentiated(dy, saved, activation, order)
    dx = product(dpre, weight, order) if needs[0] else None
    dw = torch.bmm(by_group(dpre).transpose(1, 2), by_group(x)) if needs[1] else None
    return dx, dw, dpre.sum((0, 1)) if needs[2] else None


def by_group(t: Tensor) -> Tensor:
    """(B, L, G, features) → (G, B·L, features): a view where the tokens have one stride."""
    batch, length, groups, features = t.shape
    return t.permute(2, 0, 1, 3).reshape(groups, batch * length, features)


def product(t: Tensor, w: Tensor, order: str, bias: Tensor | None = None) -> Tensor:
    """t (B, L, G, D) times w (G, D, E), plus bias (G, E), rounded once → (B, L, G, E), dense in
    ``order``."""
    batch, length, groups, _ = t.shape
    features = w.shape[2]
    out = layouts.empty((batch, length, groups, features), order, t, t.dtype)
    rows = out.permute(2, 0, 1, 3)
    flat = (groups, batch * length, features)
    if copied(t, order):
        once = bias is not None and t.element_size() < 4
        made = _plus(bias, by_group(t), w) if once else torch.bmm(by_group(t), w)
        if bias is None or once:
            rows.copy_(made.view(rows.shape))
        else:
            torch.add(made.view(rows.shape), bias[:, None, None], out=rows)
    elif bias is None:
        torch.bmm(by_group(t), w, out=rows.view(flat))
    else:
        out.copy_(bias)
        rows.view(flat).baddbmm_(by_group(t), w)
    return out


def copied(t: Tensor, order: str) -> bool:
    """Whether ``product`` of t is copied into its order: the tokens of a group have no one stride,
    or on a CPU, where a product whose batches interleave is one call of the library a group."""
    return (t.shape[0] > 1 and order == "channels") or (order != "groups" and not t.is_cuda)


def _plus(bias: Tensor | None, t: Tensor, w: Tensor) -> Tensor:
    assert bias is not None
    return torch.baddbmm(bias.unsqueeze(1), t, w)
