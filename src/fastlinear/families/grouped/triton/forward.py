"""Triton backend of grouped_linear's forward on sm_80 and later: any strides, nothing is permuted
or copied.

Tensors of tokens are (B, L, G, features) views, already validated. Importing this file imports
Triton, so it is imported lazily.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.activations.reference import math_of
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.sign_mask import Channels
from fastlinear.families.grouped.triton import tensors
from fastlinear.families.grouped.triton.config import (
    FORWARD_PRECISION,
    ProductConfig,
    parts,
    product_config,
)
from fastlinear.families.grouped.triton.kernels import _resident_kernel, _streaming_kernel
from fastlinear.kernels.triton.early_launch import EarlyLaunch, begins_early
from fastlinear.kernels.triton.launch import Launch

__all__ = ["Product", "forward"]

Tensor = torch.Tensor

_plans: dict[Any, Product] = {}


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    order: str,
    *,
    sign_mask: Channels | None = None,
    config: ProductConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = act(x_g W_gᵀ + b_g) in one kernel, float32 accumulation, deterministic.

    Args:
        x: (B, L, G, K) of any strides; float32, bfloat16 or float16.
        weight: (G, N, K) of any strides, dtype of x.
        bias: (G, N), or None.
        activation: name of the activation.
        save_pre: also return the pre-activation.
        order: how the results lie in memory, a name in ``layout.ORDERS``.
        sign_mask: where the signs of y are, which are then returned in place of the pre-activation.
        config: launch configuration; None picks ``product_config``.

    Returns:
        y (B, L, G, N) in x's dtype; the pre-activation likewise, signs as ``Channels`` says, or
        None.
    """
    y = tensors.empty((*x.shape[:3], weight.shape[1]), order, x)
    if config is not None and tensors.far_apart(x, weight, y):
        raise UnsupportedError(
            "grouped_linear",
            "rows of a tile less than 2^31 numbers apart",
            f"strides {x.stride()} and {weight.stride()}",
            "Make the tensors contiguous.",
        )
    if not x.numel() * weight.numel() or tensors.far_apart(x, weight, y):
        y, pre = reference.forward(x, weight, bias, activation, save_pre, order)
        return y, pre if sign_mask is None else sign_mask.packed(y, activation)
    kept: Tensor | None
    if sign_mask is not None:
        kept = x.new_empty(sign_mask.shape, dtype=torch.uint8)
    else:
        kept = tensors.empty(y.shape, order, x) if save_pre else None
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    key = (tensors.facts_of(x, weight, bias, y), activation, save_pre, sign_mask, config)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= tensors.MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = Product(x, weight, y, activation, config, sign_mask)
    plan.launch(x, weight, bias, y, kept)
    if sign_mask is None and kept is not None:
        kept = tensors.rounded(kept, x)
    return tensors.rounded(y, x), kept


class Product:
    """The one launch of y = act(x Wᵀ + b), for tensors of one kind."""

    __slots__ = ("launch",)

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        y: Tensor,
        activation: str,
        config: ProductConfig | None = None,
        sign_mask: Channels | None = None,
    ) -> None:
        batch, length, groups, k = x.shape
        n = weight.shape[1]
        if config is None:
            facts = x.element_size(), tensors.units_of(x.device), tensors.capability_of(x.device)
            across = x.stride(1) == 1 != x.stride(3)
            config = product_config(batch * length, groups, k, n, *facts, across)
        place = tensors.Tiles(x, config.block_m)
        columns = -(-n // config.block_n)
        how = (activation, math_of(x.dtype), FORWARD_PRECISION, place.across)
        interpreted = x.device.type == "cpu"
        if config.block_k:
            kernel: Any = _streaming_kernel
            grid = (place.tiles * columns, groups)
            rest: tuple[Any, ...] = (
                *(*place.shape, columns, *tensors.arguments(x, weight, y)),
                *(k, n, config.block_m, config.block_n, config.block_k),
                *(*how, interpreted),
            )
        else:
            kernel = _resident_kernel
            grid = (groups * columns, -(-place.tiles // config.tiles))
            rest = (
                *(*place.shape, place.tiles, config.tiles, columns),
                *tensors.arguments(
                    x, weight, y, None if sign_mask is None else sign_mask.like_rows()
                ),
                *(k, n, *parts(k), config.block_m, config.block_n),
                *(*how, config.stages, interpreted, begins_early(x.device)),
            )
        launch = Launch if config.block_k else EarlyLaunch
        self.launch = launch(kernel, grid, rest, x.device, warps=config.warps, stages=config.stages)
