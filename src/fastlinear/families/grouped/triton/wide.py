"""Triton forward of wide groups on Hopper and later: tiles come and go through the copy engine.

Serves 16-bit tokens-first tensors whose groups are whole tiles. Importing this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastlinear.activations.reference import math_of
from fastlinear.families.grouped.triton import forward as anywhere
from fastlinear.families.grouped.triton import tensors
from fastlinear.families.grouped.triton.config import fits
from fastlinear.families.grouped.triton.wide_kernels import _wide_kernel
from fastlinear.kernels.triton.launch import Launch

__all__ = ["WideConfig", "forward", "serves"]

Tensor = torch.Tensor

_plans: dict[Any, Launch] = {}


@dataclass(frozen=True)
class WideConfig:
    """One way to launch the kernel.

    Attributes:
        block_m, block_n, block_k: tokens, outputs and inputs of a tile.
        warps, stages: warps of a program, depth of the load pipeline.
        halves: whether the results leave in two halves, which takes less shared memory.
        programs: programs that walk tiles, for each multiprocessor; 0: one a tile.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    warps: int = 8
    stages: int = 4
    halves: bool = True
    programs: int = 1


def config_of(n: int, capability: tuple[int, int]) -> WideConfig:
    """The configuration for N outputs. On an H200 programs that walk tiles are a quarter faster
    than one program a tile."""
    stages = 4 if capability[0] == 9 else 3
    return WideConfig(block_n=256 if n % 256 == 0 else 128, stages=stages)


def serves(x: Tensor, weight: Tensor, order: str) -> bool:
    """Whether the kernel takes such tensors: 16-bit, tokens first, rows at 16 bytes."""
    batch, _, groups, k = x.shape
    return (
        x.element_size() == 2
        and fits(k, weight.shape[1])
        and batch == 1
        and order == "tokens"
        and (x.stride(3), x.stride(2)) == (1, k)
        and x.stride(1) % 8 == 0
        and x.stride(1) >= groups * k
        and x.data_ptr() % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and tensors.capability_of(x.device) >= (9, 0)
    )


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    order: str,
    *,
    config: WideConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = act(x_g W_gᵀ + b_g) in one kernel, float32 accumulation, deterministic.

    Args:
        x: (B, L, G, K); bfloat16 or float16. What ``serves`` refuses goes to the other Triton
            kernels.
        weight: (G, N, K), dtype of x.
        bias: (G, N), or None.
        activation: name of the activation.
        save_pre: also return the pre-activation.
        order: how the results lie in memory, a name in ``layout.ORDERS``.
        config: launch configuration; None picks ``config_of``.

    Returns:
        y (B, L, G, N) in x's dtype; the pre-activation likewise, or None.
    """
    _, m, groups, k = x.shape
    n = weight.shape[1]
    if not x.numel() * weight.numel() or not serves(x, weight, order):
        return anywhere.forward(x, weight, bias, activation, save_pre, order)
    if config is None:
        config = config_of(n, tensors.capability_of(x.device))
    y = tensors.empty((1, m, groups, n), "tokens", x)
    pre = tensors.empty(y.shape, "tokens", x) if save_pre else None
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    rows = _rows(x)
    key = (tensors.facts_of(rows, weight, bias, y), activation, save_pre, config)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= tensors.MAX_PLANS:
            _plans.clear()
        columns, tiles = (
            n // config.block_n,
            -(-m // config.block_m) * groups * (n // config.block_n),
        )
        programs = tiles
        if config.programs:
            programs = min(tiles, config.programs * tensors.units_of(x.device))
        part = config.block_n // 2 if config.halves else config.block_n
        plan = _plans[key] = Launch(
            _wide_kernel,
            (programs,),
            (
                *(groups, columns, tiles, programs, k, n),
                *(config.block_m, config.block_n, config.block_k, config.halves),
                *(activation, math_of(x.dtype), x.device.type == "cpu"),
            ),
            x.device,
            warps=config.warps,
            stages=config.stages,
            block_shapes={
                0: [config.block_m, config.block_k],
                1: [config.block_n, config.block_k],
                3: [config.block_m, part],
                4: [config.block_m, part],
            },
        )
    flat = weight.view(groups * n, k)
    plan(rows, flat, bias, y.view(m, groups * n), None if pre is None else pre.view(m, groups * n))
    return tensors.rounded(y, x), None if pre is None else tensors.rounded(pre, x)


def _rows(x: Tensor) -> Tensor:
    """x (1, M, G, K), whose groups lie side by side, as (M, G·K)."""
    _, m, groups, k = x.shape
    return x.as_strided((m, groups * k), (x.stride(1), 1))
