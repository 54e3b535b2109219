"""Backend ``batch_invariant`` of grouped_linear: a token's result does not depend on other tokens.

On a GPU one Triton kernel whose tiles depend on the features only, on a CPU one product a group.
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.reference import by_group
from fastlinear.families.grouped.triton import config
from fastlinear.families.linear import batch_invariant as layers


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (B, L, G, K), weight (G, N, K), bias (G, N) → y (B, L, G, N) in ``order``."""
    if x.is_cuda:
        from fastlinear.families.grouped.triton import forward as triton

        return triton.forward(
            *(x, weight, bias, activation, save_pre, order),
            config=config.batch_invariant_config(
                weight.shape[2], weight.shape[1], x.element_size()
            ),
        )
    y = layouts.empty((*x.shape[:3], weight.shape[1]), order, x, x.dtype)
    pre = layouts.empty(y.shape, order, x, x.dtype) if save_pre else None
    rows = by_group(x)
    for g in range(weight.shape[0]):
        own = None if bias is None else bias[g].contiguous()
        found, kept = layers.forward(rows[g], weight[g], own, activation, save_pre)
        y[:, :, g].copy_(found.view(y[:, :, g].shape))
        if pre is not None and kept is not None:
            pre[:, :, g].copy_(kept.view(y[:, :, g].shape))
    return y, pre
