"""Forward of many narrow groups on Hopper, in CUDA C++: ``packed_groups.cu``,
``packed_groups_float32.cu``.

A few groups' columns that lie side by side, a strip, begin and end at 16 bytes where those of one
group need not: 2 groups of 100 16-bit numbers are 400 bytes. Tiles of strips go through the copy
engine, and the weights stay in registers, those of float32 in shared memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.problem import Problem
from fastlinear.families.grouped.cuda import packed_groups_float32 as float32
from fastlinear.families.grouped.cuda import packed_groups_tiles
from fastlinear.families.grouped.cuda.one_launch import OneLaunch, results
from fastlinear.families.grouped.cuda.packed_groups_config import (
    PackedConfig,
    finished,
    limit,
    packed_config,
    service_warps,
    shared_bytes,
)
from fastlinear.families.grouped.cuda.packed_groups_float32 import Float32Config
from fastlinear.families.grouped.cuda.packed_groups_tiles import (
    EXACTLY,
    LEAST_WHOLE,
    SERVICE_REGISTERS,
    SIZE,
    Cut,
    Split,
    has_dense_rows,
    later_for,
    ordinal,
    side_by_side,
    source_of,
    stages_for,
    tile_bytes,
)
from fastlinear.families.grouped.sign_mask import AnyPlace, Place
from fastlinear.native import cuda_driver as driver

ARCH = "sm_90a"
KERNEL = "grouped_linear_strips"


def source(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    has_bias: bool,
    save_pre: bool,
    config: PackedConfig,
    shared: bool = False,
    sign_mask: bool = False,
) -> str:
    """The complete CUDA C++ source of one specialisation."""
    macros = {
        "IS_BF16": int(dtype is torch.bfloat16),
        "SIZE": SIZE,
        "SHARED": int(shared),
        "K": k,
        "N": n,
        "P": config.groups,
        "PARTS": config.parts,
        "STAGES": config.stages,
        "OUTS": config.outs,
        "BLOCKS": config.blocks,
        "SERVICE_WARPS": service_warps(config),
        "REGISTERS": limit(config)[0] if service_warps(config) > 2 else 0,
        "SERVICE_REGISTERS": SERVICE_REGISTERS,
        "HAS_BIAS": int(has_bias),
        "SAVE_PRE": int(save_pre),
        "SIGNS": int(sign_mask),
        "STAGED": int(config.staged > 0),
        "MIXED": 2 if config.mixed else 1,
    }
    return source_of(
        "packed_groups.cu", activation, macros, ("derivatives.h", "packed_groups_sign_mask.h")
    )


@cache
def _kernel(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    has_bias: bool,
    save_pre: bool,
    config: PackedConfig | Float32Config,
    shared: bool,
    sign_mask: bool,
    device: int,
) -> driver.Kernel:
    how = (k, n, activation, has_bias, save_pre)
    if isinstance(config, Float32Config):
        text, name = float32.source(*how, config, shared), float32.KERNEL
        room = float32.shared_bytes(config, k, n, save_pre)
    else:
        text, name = source(dtype, *how, config, shared, sign_mask), KERNEL
        room = shared_bytes(config, k, n, save_pre, sign_mask)
    return driver.Kernel(driver.compile_cubin(text, f"{name}.cu", ARCH), name, room, device)


def _config(
    x: Tensor, weight: Tensor, order: str, save_pre: bool, sign_mask: AnyPlace | None
) -> PackedConfig | Float32Config | None:
    _, m, groups, k = x.shape
    n = weight.shape[1]
    if x.dtype is torch.float32:
        return float32.float32_config(k, n, save_pre)
    together = sign_mask.p if isinstance(sign_mask, Place) and order == "groups" else None
    side = side_by_side(order, m, groups)
    config = packed_config(side, k, n, save_pre, sign_mask is not None, together, order)
    if config is None:
        return None
    size = config.blocks * tile_bytes(config.groups * k)
    config = replace(config, stages=stages_for(x.device, config.stages, size))
    how = k, n, save_pre, sign_mask is not None, order
    return finished(config, *how, weight.data_ptr() % 16 == 0)


def reason_not(p: Problem) -> str | None:
    """Why the kernel cannot serve a forward Problem, or None."""
    reason = packed_groups_tiles.reason_not(p)
    if reason is not None:
        return reason
    if p.dtype not in ("float32", "bfloat16", "float16"):
        return f"serves float32, bfloat16 and float16, not {p.dtype}"
    m, groups, k, n = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    served = (
        float32.float32_config(k, n, True)
        if p.dtype == "float32"
        else packed_config(
            side_by_side(p.option("order"), m, groups), k, n, True, order=p.option("order")
        )
    )
    return packed_groups_tiles.no_strip(p) if served is None else None


def serves(x: Tensor, weight: Tensor, bias: Tensor | None, order: str) -> bool:
    """Whether the kernel takes such tensors: tokens or groups first, rows at 16 bytes."""
    return (
        x.shape[0] == 1
        and x.element_size() in (SIZE, float32.SIZE)
        and has_dense_rows(x, order)
        and weight.is_contiguous()
        and weight.data_ptr() % 4 == 0
        and (bias is None or (bias.is_contiguous() and bias.data_ptr() % 4 == 0))
    )


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    order: str,
    *,
    config: PackedConfig | Float32Config | None = None,
    sign_mask: Place | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = act(x_g W_gᵀ + b_g) in one kernel, float32 accumulation, deterministic.

    Args:
        x: (B, L, G, K); float32, bfloat16 or float16. What ``serves`` refuses goes to the Triton
            backend.
        weight: (G, N, K), dtype of x.
        bias: (G, N), or None.
        activation: name of the activation.
        save_pre: also return the pre-activation.
        order: how the results lie in memory, a name in ``layout.ORDERS``.
        config: launch configuration; None picks ``packed_config`` or ``float32_config``. One that
            is ``staged`` takes weights at 16 bytes only.
        sign_mask: where the signs of y are, which are then returned in place of the pre-activation.

    Returns:
        y (B, L, G, N) in x's dtype; the pre-activation likewise, signs as ``Place`` says, or None.
    """
    if config is None:
        config = _config(x, weight, order, save_pre, sign_mask)
    if config is None or not x.numel() * weight.numel() or not serves(x, weight, bias, order):
        from fastlinear.families.grouped.triton import forward as triton

        y, pre = triton.forward(x, weight, bias, activation, save_pre, order)
        return y, pre if sign_mask is None else sign_mask.packed(y, activation)
    how = activation, save_pre, order, config
    if sign_mask is None:
        return results(Packed, x, weight, bias, *how)
    assert sign_mask.p == (config.groups if order == "groups" else 1)
    return results(PackedWithSignMask, x, weight, bias, *how, sign_mask)


class Packed(OneLaunch):
    """The launch of ``packed_groups.cu`` or ``packed_groups_float32.cu``."""

    MAPS = ("x", "y", "pre")
    POINTERS = ("weight", "bias", "x", "y", "pre")
    SIGNS: ClassVar[bool] = False

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        save_pre: bool,
        order: str,
        config: PackedConfig | Float32Config,
    ) -> None:
        super().__init__(ordinal(x))
        _, m, groups, k = x.shape
        n = weight.shape[1]
        cut = Cut.of(order, m, groups, config.groups)
        how = (activation, bias is not None, save_pre, config, cut.shared, self.SIGNS)
        with driver.loading_allowed():
            kernel = _kernel(x.dtype, k, n, *how, self._device)
        units = device_facts(x.device).units
        # in float32 arithmetic wants all multiprocessors
        wide = config.blocks == 1 and cut.tiles >= LEAST_WHOLE
        later = EXACTLY if isinstance(config, Float32Config) else later_for(x.device, wide)
        split = Split(cut.strips, cut.tiles, units * config.blocks, 1, later)
        place = (x.data_ptr(), self._device)
        row = groups * k if m == 1 else x.stride(1)
        maps = (
            cut.map(x.dtype, k, row, *place),
            *(cut.map(x.dtype, n, groups * n, *place) for _ in range(2)),
        )
        numbers = cut.rows, cut.tiles, split.each, split.more
        self._prepare(kernel, config.threads, split.blocks, maps, numbers)


class PackedWithSignMask(Packed):
    """The same that has the signs of y as a result, 16-bit dtypes only."""

    SIGNS = True
