"""Backward of many narrow groups on Hopper, in CUDA C++: ``packed_groups_backward.cu``,
``packed_groups_backward_float32.cu``.

One pass over dy, what the forward saved, and x: dx leaves at once, dW and db stay in registers over
a block's tiles of tokens and leave as float32 shares, which a second launch adds up in order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.problem import Problem
from fastlinear.families.grouped.cuda import packed_groups_backward_float32 as float32
from fastlinear.families.grouped.cuda import packed_groups_tiles
from fastlinear.families.grouped.cuda.one_pass import OnePass, gradients, row_stride
from fastlinear.families.grouped.cuda.packed_groups_backward_config import (
    PackedBackwardConfig,
    finished,
    limit,
    packed_backward_config,
    service_warps,
    shared_bytes,
    stage_bytes,
)
from fastlinear.families.grouped.cuda.packed_groups_backward_float32 import Float32BackwardConfig
from fastlinear.families.grouped.cuda.packed_groups_tiles import (
    EXACTLY,
    LEAST_TILES,
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
)
from fastlinear.families.grouped.reference import Gradients, Needs
from fastlinear.families.grouped.sign_mask import Place, is_sign_mask
from fastlinear.kernels.cuda import hopper
from fastlinear.native import cuda_driver as driver

ARCH = "sm_90a"
KERNEL, SUMS_KERNEL = "grouped_linear_strips_backward", "grouped_linear_strips_sums"
Config = PackedBackwardConfig | Float32BackwardConfig


def source(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: PackedBackwardConfig,
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
        "ACROSS": config.across,
        "STAGES": config.stages,
        "OUTS": config.outs,
        "BLOCKS": config.blocks,
        "SERVICE_WARPS": service_warps(config),
        "REGISTERS": limit(config)[0] if service_warps(config) > 1 else 0,
        "SERVICE_REGISTERS": SERVICE_REGISTERS,
        "SIGNS": int(sign_mask),
        "STAGED": int(config.staged > 0),
        **{f"NEED_{name}": int(need) for name, need in zip(("DX", "DW", "DB"), needs, strict=True)},
    }
    return source_of(
        "packed_groups_backward.cu",
        activation,
        macros,
        ("derivatives.h", "packed_groups_sign_mask.h"),
    )


@cache
def _kernels(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: Config,
    shared: bool,
    sign_mask: bool,
    device: int,
) -> tuple[driver.Kernel, driver.Kernel]:
    saved = activation != "none"
    if isinstance(config, Float32BackwardConfig):
        names = float32.KERNEL, float32.SUMS_KERNEL
        text = float32.source(k, n, activation, needs, config, shared)
        room = float32.shared_bytes(config, k, n, saved, needs)
    else:
        names = KERNEL, SUMS_KERNEL
        text = source(dtype, k, n, activation, needs, config, shared, sign_mask)
        room = shared_bytes(config, k, n, saved, needs, sign_mask)
    cubin = driver.compile_cubin(text, f"{names[0]}.cu", ARCH)
    sums = driver.Kernel(cubin, names[1], 0, device)
    return driver.Kernel(cubin, names[0], room, device), sums


def _config(
    x: Tensor, weight: Tensor, saved: Tensor | None, needs: Needs, order: str
) -> Config | None:
    _, m, groups, k = x.shape
    n = weight.shape[1]
    if x.dtype is torch.float32:
        return float32.float32_backward_config(k, n, saved is not None, needs)
    how = saved is not None, needs, is_sign_mask(saved)
    config = packed_backward_config(side_by_side(order, m, groups), k, n, *how, order)
    if config is None:
        return None
    size = config.blocks * stage_bytes(config, k, n, *how)
    config = replace(config, stages=stages_for(x.device, config.stages, size))
    return finished(config, k, n, *how, order, weight.data_ptr() % 16 == 0)


def reason_not(p: Problem) -> str | None:
    """Why the kernel cannot serve a backward Problem, or None."""
    reason = packed_groups_tiles.reason_not(p)
    if reason is not None:
        return reason
    if p.dtype not in ("float32", "bfloat16", "float16"):
        return f"serves float32, bfloat16 and float16, not {p.dtype}"
    m, groups, k, n = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    if p.dtype == "float32" and m < float32.LEAST_TOKENS:
        return f"serves {float32.LEAST_TOKENS} tokens and more of float32, not {m}"
    side = side_by_side(p.option("order"), m, groups)
    served = (
        float32.float32_backward_config(k, n)
        if p.dtype == "float32"
        else packed_backward_config(side, k, n, order=p.option("order"))
    )
    if served is None:
        return packed_groups_tiles.no_strip(p)
    return None


def serves(dy: Tensor, saved: Tensor | None, x: Tensor, weight: Tensor, order: str) -> bool:
    """Whether the kernel takes such tensors: tokens or groups first, rows at 16 bytes."""
    if is_sign_mask(saved):
        if x.element_size() != SIZE:
            return False
        saved = None
    return (
        x.shape[0] == 1
        and (x.element_size() == SIZE or x.shape[1] >= float32.LEAST_TOKENS)
        and x.element_size() in (SIZE, float32.SIZE)
        and all(
            t is None or (t.dtype is x.dtype and has_dense_rows(t, order)) for t in (dy, saved, x)
        )
        and weight.dtype is x.dtype
        and weight.is_contiguous()
        and weight.data_ptr() % 4 == 0
    )


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
    *,
    config: Config | None = None,
) -> Gradients:
    """(dx, dW, db), each None where not needed, in one pass and the sums of its shares.

    Args:
        dy: (B, L, G, N); float32, bfloat16 or float16. What ``serves`` refuses goes to the Triton
            backend.
        saved: (B, L, G, N), dtype of dy: what the activation saves,
            its output y or the pre-activation; None for ``"none"``. Or in place of y for relu and
            leaky_relu its signs, as ``sign_mask.Place`` says.
        x: (B, L, G, K), dtype of dy.
        weight: (G, N, K), dtype of dy.
        activation: name of the activation.
        needs: which of dx, dW and db are wanted.
        order: how dx lies in memory.
        config: launch configuration; None picks ``packed_backward_config`` or
            ``float32_backward_config``. One that is ``staged`` takes W at 16 bytes only.

    Returns:
        dx (B, L, G, K), dW (G, N, K) and db (G, N) in dy's dtype. Products and sums accumulate
        in float32 over dpre rounded to dy's dtype, in a fixed order.
    """
    groups, n = weight.shape[:2]
    if activation == "none":
        saved = None
    if config is None:
        config = _config(x, weight, saved, needs, order)
    empty = not x.numel() * dy.numel() or not any(needs)
    if config is None or empty or not serves(dy, saved, x, weight, order):
        from fastlinear.families.grouped.triton import backward as triton_backward

        if saved is not None and is_sign_mask(saved):
            place = Place.of(saved, order, x.shape[1], groups, n)
            saved = place.unpacked(saved, dy.dtype)
        return triton_backward.backward(dy, saved, x, weight, activation, needs, order)
    given = dy, saved, x, weight
    return gradients(PackedBackward, *given, activation, needs, order, config)


class PackedBackward(OnePass):
    """The launches of ``packed_groups_backward.cu`` or ``packed_groups_backward_float32.cu``."""

    MAPS = ("dy", "saved", "x", "dx")
    POINTERS = ("weight", "dw", "db", "dy", "saved", "x", "dx")

    def __init__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        activation: str,
        needs: Needs,
        order: str,
        config: Config,
    ) -> None:
        super().__init__(ordinal(x))
        _, m, groups, k = x.shape
        n = weight.shape[1]
        cut = Cut.of(order, m, groups, config.groups)
        with_signs = is_sign_mask(saved)
        how = (activation, needs, config, cut.shared, with_signs)
        with driver.loading_allowed():
            kernel, sums = _kernels(x.dtype, k, n, *how, self._device)
        units = device_facts(x.device).units
        shares, at_once, least = cut.p if cut.shared else 1, 2, LEAST_TILES
        later = later_for(x.device, saved is None or with_signs)
        if isinstance(config, Float32BackwardConfig):  # arithmetic wants all multiprocessors
            shares, at_once, least, later = config.teams, 4, float32.LEAST_TILES, EXACTLY
        split = Split(cut.strips, cut.tiles, units * config.blocks, least, later)
        slots = split.slots * shares
        narrow = not isinstance(config, Float32BackwardConfig) or float32.NARROW

        def tiles(t: Tensor, dense: bool = False) -> driver.TensorMap:
            place = row_stride(t, dense), t.data_ptr(), self._device
            return cut.map(t.dtype, t.shape[3], *place, narrow)

        numbers_saved = x if saved is None or with_signs else saved
        maps = [tiles(dy), tiles(numbers_saved), tiles(x), tiles(x, dense=True)]
        whose = (cut.tiles, split.each, split.more)
        numbers = (cut.rows, groups, slots, *whose)
        launch = hopper.EarlyLaunch
        self._prepare_pass(launch, kernel, _threads(config), 1, split.blocks, maps, numbers)
        self._prepare_sums(launch, sums, weight, needs, slots, at_once, (groups, *whose))


def _threads(config: Config) -> int:
    if isinstance(config, Float32BackwardConfig):
        return config.threads
    return 32 * (config.groups * config.parts + service_warps(config))
