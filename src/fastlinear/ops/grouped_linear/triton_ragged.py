"""Triton backend of ragged_linear on sm_80 and later. Importing this file imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from fastlinear.ops.common.triton_launch import Launch
from fastlinear.ops.grouped_linear import triton_tensors as tensors
from fastlinear.ops.grouped_linear.triton_config import dot_precision, padded
from fastlinear.ops.grouped_linear.triton_ragged_kernels import (
    _ragged_kernel,
    _ragged_weight_kernel,
)

__all__ = ["MAX_GROUPS", "grad_input", "grad_weight", "product"]

MAX_GROUPS = 2047
_plans: dict[Any, Launch] = {}


@dataclass(frozen=True)
class _Config:
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@lru_cache(maxsize=256)
def _config(rows: int, groups: int, n: int, itemsize: int) -> _Config:
    """Tiles of a product; how rows divide among the groups is not known, so their mean counts."""
    mean = padded(max(1, rows // groups))
    if itemsize == 4:
        return _Config(min(64, mean), min(64, padded(n)), 32, 4, 3)
    block_m, block_n = min(128, mean), min(128, padded(n))
    return _Config(block_m, block_n, 64, 8 if block_m * block_n > 8192 else 4, 3)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: Tensor | None,
    sizes: Tensor,
    activation: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): act(x_g W_gᵀ + b_g) for the rows of every group, 0 for rows of none; or, where
    ``saved`` is given, (x · act'(pre)) W_gᵀ.

    Args:
        x: (T, K), contiguous rows; float32, bfloat16 or float16.
        weight: (G, N, K) of any strides, dtype of x; at most ``MAX_GROUPS`` groups.
        bias: (G, N) contiguous, or None.
        saved: (T, K) contiguous, what the activation's derivative is computed from, or None.
        sizes: (G,) contiguous integers on the same device.
        activation: name of the activation.
        save_pre: also return the pre-activation.

    Returns:
        (T, N) each, in x's dtype; float32 accumulation, deterministic.
    """
    rows, k = x.shape
    groups, n, _ = weight.shape
    y = tensors.vector((rows, n), x)
    pre = tensors.vector((rows, n), x) if save_pre else None
    key = ("product", *tensors.facts_of(x, weight, bias, saved, sizes, y), activation, save_pre)

    def make() -> Launch:
        config = _config(rows, groups, n, x.element_size())
        columns = -(-n // config.block_n)
        rest = (
            *(rows, groups, columns, x.stride(0), *weight.stride(), k, n, padded(groups + 1)),
            *(config.block_m, config.block_n, config.block_k, activation),
            *(tensors.math_of(x.dtype), dot_precision(k), x.device.type == "cpu"),
        )
        most = -(-rows // config.block_m) + groups + 1
        return Launch(
            *(_ragged_kernel, (most * columns,), rest, x.device),
            warps=config.warps,
            stages=config.stages,
        )

    _plan(key, make)(x, weight, bias, saved, sizes, y, pre)
    return tensors.rounded(y, x), None if pre is None else tensors.rounded(pre, x)


def grad_input(
    dy: Tensor, saved: Tensor | None, weight: Tensor, sizes: Tensor, activation: str
) -> Tensor:
    """dx = (dy · act'(pre)) W_g, (T, K), 0 for rows of no group; arguments as of ``product``."""
    return product(dy, weight.transpose(1, 2), None, saved, sizes, activation, False)[0]


def grad_weight(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    sizes: Tensor,
    activation: str,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(dW (G, N, K), db (G, N)) in dy's dtype, None where not needed; exact zeros for groups
    without rows. dy (T, N) and x (T, K) have contiguous rows; ``saved`` is contiguous."""
    rows, k = x.shape
    n, groups = dy.shape[1], sizes.shape[0]
    dw = tensors.vector((groups, n, k), x) if need_weight else None
    db = tensors.vector((groups, n), x) if need_bias else None
    key = ("weight", *tensors.facts_of(dy, saved, x, sizes, dw, db), activation)

    def make() -> Launch:
        wide = x.element_size() == 4
        widest = 64 if wide else 128
        block_n, block_k = min(widest, padded(n)), min(widest, padded(k))
        columns = -(-k // block_k) if need_weight else 1
        rest = (
            *(rows, groups, columns, dy.stride(0), x.stride(0), k, n, padded(groups + 1)),
            *(32 if wide else 64, block_n, block_k, activation, tensors.math_of(x.dtype)),
            *(dot_precision(rows), x.device.type == "cpu"),
        )
        grid = (-(-n // block_n) * columns, groups)
        warps = 8 if block_n * block_k > 8192 else 4
        return Launch(_ragged_weight_kernel, grid, rest, x.device, warps=warps, stages=3)

    _plan(key, make)(dy, saved, x, sizes, dw, db)
    return (
        None if dw is None else tensors.rounded(dw, x),
        None if db is None else tensors.rounded(db, x),
    )


def _plan(key: Any, make: Any) -> Launch:
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= tensors.MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = make()
    return plan
