"""More ways to compute the forward by PyTorch's own ops; which is fastest depends on layout, sizes
and device, so all of them compete."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.reference import (
    Gradients,
    Needs,
    activated,
    by_group,
    differentiated,
)

_MAX_LOOP = 512  # groups


def baddbmm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """One batched product with the bias inside, groups first; then a copy into ``order``."""
    groups, n, _ = weight.shape
    rows, w = by_group(x), weight.transpose(1, 2)
    pre = torch.bmm(rows, w) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, w)
    return _finished(
        pre.view(groups, *x.shape[:2], n).permute(1, 2, 0, 3), activation, save_pre, order
    )


def loop_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """One product a group, each written into its place."""
    groups, n, _ = weight.shape
    pre = layouts.empty((*x.shape[:3], n), order, x, x.dtype)
    rows = by_group(x)
    for g in range(groups):
        part = F.linear(rows[g], weight[g], None if bias is None else bias[g])
        pre[:, :, g].copy_(part.view(*x.shape[:2], n))
    return _finished(pre, activation, save_pre, order)


def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """A grouped convolution over one position: (B, G·K, L) → (B, G·N, L)."""
    batch, length, groups, k = x.shape
    n = weight.shape[1]
    channels = x.permute(0, 2, 3, 1).reshape(batch, groups * k, length)
    flat = None if bias is None else bias.reshape(groups * n)
    pre = F.conv1d(channels, weight.reshape(groups * n, k, 1), flat, groups=groups)
    return _finished(
        pre.view(batch, groups, n, length).permute(0, 3, 1, 2), activation, save_pre, order
    )


def loop_backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
) -> Gradients:
    """Two products a group, each written into its place."""
    dpre = differentiated(dy, saved, activation, order)
    groups, _, k = weight.shape
    rows, inputs = by_group(dpre), by_group(x)
    dx = layouts.empty(x.shape, order, x, x.dtype) if needs[0] else None
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[1] else None
    for g in range(groups):
        if dx is not None:
            dx[:, :, g].copy_((rows[g] @ weight[g]).view(*x.shape[:2], k))
        if dw is not None:
            torch.mm(rows[g].t(), inputs[g], out=dw[g])
    return dx, dw, dpre.sum((0, 1)) if needs[2] else None


def reason_not_loop(p: Problem) -> str | None:
    """Why the loop over groups cannot serve, or None."""
    if p.dtype == "float64" and p.device == "cuda":
        return "float64 is left to one batched product"
    if p.dim("G") > _MAX_LOOP:
        return f"serves at most {_MAX_LOOP} groups, the call has {p.dim('G')}"
    return None


def reason_not_conv(p: Problem) -> str | None:
    """Why the grouped convolution cannot serve, or None."""
    if p.option("order") != "channels":
        return "serves channels first only"
    if p.device == "cuda" and p.dtype == "float32":
        return "cuDNN may take TF32 for float32 by its own default (error 1e-4)"
    return None


def _finished(
    pre: Tensor, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    return activated(layouts.dense(pre, order), activation, save_pre, order)
