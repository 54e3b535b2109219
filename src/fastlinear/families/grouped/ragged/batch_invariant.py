"""Backend ``batch_invariant`` of ragged_linear: a row's result does not depend on other rows.

On a GPU the Triton kernels with tiles that depend on the features only, on a CPU one product a
group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.families.grouped.ragged import products
from fastlinear.families.grouped.ragged.validation import counted
from fastlinear.families.linear import batch_invariant as layers

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def forward(
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, pre if asked, a copy of the sizes): x (T, K), weight (G, N, K), sizes (G,), bias (G, N) →
    (T, N) each.

    Rows after the last group's are 0. Sizes are read on the host where x is on a CPU.
    """
    if x.is_cuda:
        from fastlinear.families.grouped.ragged.triton import backend

        how = backend.batch_invariant_config(weight.shape[2], weight.shape[1], x.element_size())
        y, pre, _ = backend.forward(x, weight, sizes, bias, activation, save_pre, config=how)
        return y, pre, sizes.clone()
    y = x.new_zeros(x.shape[0], weight.shape[1])
    pre = torch.zeros_like(y) if save_pre else None
    begin = 0
    for g, size in enumerate(counted(sizes, x.shape[0])):
        end = begin + size
        own = None if bias is None else bias[g].contiguous()
        if size:
            found, kept = layers.forward(x[begin:end], weight[g], own, activation, save_pre)
            y[begin:end] = found
            if pre is not None and kept is not None:
                pre[begin:end] = kept
        begin = end
    return y, pre, sizes.clone()


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """(dx, dW, db), each None where not needed, as the other backends form them."""
    if x.is_cuda:
        from fastlinear.families.grouped.ragged.triton import backend

        return backend.backward(dy, saved, x, weight, sizes, activation, needs)
    read = counted(sizes, x.shape[0])
    return products.gradients(dy, saved, x, weight, read, activation, needs)
