"""Triton backend of ragged_linear on sm_80 and later. Importing this file imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import math_of
from fastlinear.families.grouped.ragged.layout import with_rows
from fastlinear.families.grouped.ragged.triton.kernels import (
    _ragged_kernel,
    _ragged_weight_kernel,
)
from fastlinear.families.grouped.triton import tensors
from fastlinear.families.grouped.triton.config import FORWARD_PRECISION, dot_precision, padded
from fastlinear.kernels.triton.launch import Launch

__all__ = ["MAX_GROUPS", "Config", "backward", "forward", "grad_input", "grad_weight", "product"]

MAX_GROUPS = 65535  # of the second axis of a launch
_MOST_SIZES = 1024  # that a program looks at together; more would spill registers
_MANY = 1 << 32  # multiply-adds
_WIDE = 8192  # outputs
_LARGE, _MANY_ROWS = 1 << 24, 256  # numbers of a group's weight, rows of all groups
_plans: dict[Any, Launch] = {}


@dataclass(frozen=True)
class Config:
    """One way to launch a kernel.

    Attributes:
        block_m, block_n, block_k: of a tile: rows, then outputs and inputs of the product.
        warps, stages: warps of a program, depth of the load pipeline.
        high: tiles of rows that take turns with a weight's columns.
        tma: whether tiles come through descriptors, where the tensors allow it.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    high: int = 8
    tma: bool = False


@lru_cache(maxsize=256)
def product_config(
    rows: int, groups: int, k: int, n: int, itemsize: int, described: bool = False
) -> Config:
    """Tiles of a product; how rows divide among the groups is not known, so their mean counts.

    Numbers of rows that do not begin at 16 bytes are addressed one by one: tiles are smaller then.

    Args:
        described: whether descriptors serve the tensors, of which there are two.
    """
    mean = padded(max(1, rows // groups))
    odd = k % 8 > 0 or n % 8 > 0
    if itemsize == 4 or odd:
        widest = 32 if itemsize == 4 and odd else 64
        return Config(min(64, mean), min(widest, padded(n)), 32, 4, 3)
    block_m, block_n = min(128, mean), min(128, padded(n))
    large = _are_many(rows, groups, k, n)
    if large and described and n >= _WIDE:
        return Config(128, 256, 64, 8, 3, tma=True)
    return Config(block_m, block_n, 64, 8 if block_m * block_n > 8192 else 4, 3, tma=large)


def batch_invariant_config(k: int, n: int, itemsize: int) -> Config:
    """The tiles of a product for any number of rows: a row is summed in the same order."""
    block_n = min(64, padded(n))
    return Config(64, block_n if itemsize == 2 else min(32, block_n), 32, 4, 3)


@lru_cache(maxsize=256)
def weight_config(
    rows: int, groups: int, k: int, n: int, itemsize: int, described: bool = False
) -> Config:
    """Tiles of dW: block_m rows at a time, block_n by block_k of its numbers.

    Args:
        described: whether descriptors serve the tensors, of which there are two.
    """
    mean = padded(max(1, rows // groups))
    narrow = itemsize == 4 or k % 8 or n % 8
    widest = 64 if narrow else 128
    block_n, block_k = min(widest, padded(n)), min(widest, padded(k))
    warps = 8 if block_n * block_k > 8192 else 4
    if described and not narrow and _are_many(rows, groups, k, n):
        return Config(32, block_n, block_k, 4, 4, tma=True)
    return Config(min(32 if narrow else 64, mean), block_n, block_k, warps, 3)


def _are_many(rows: int, groups: int, k: int, n: int) -> bool:
    """Whether a product is long enough for descriptors, whose launches take the host longer."""
    return rows >= 128 * groups and rows * k * n >= _MANY


def _described(*matrices: Tensor | None) -> bool:
    """Whether descriptors serve them on their device: 16-bit, rows at 16 bytes."""
    given = [t for t in matrices if t is not None]
    return all(
        t.element_size() == 2
        and t.stride(-1) == 1
        and t.stride(-2) % 8 == 0
        and t.data_ptr() % 16 == 0
        and tensors.capability_of(t.device) >= (9, 0)
        for t in given
    )


def forward(
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    *,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None, None]:
    """(y, pre if asked, None), (T, N) each, in one launch; tensors of any strides.

    ``config``: as for ``product``.
    """
    flat = None if bias is None else bias.resolve_neg().contiguous()
    given = (with_rows(x), weight.resolve_neg(), flat, None, sizes.contiguous())
    return *product(*given, activation, save_pre, config=config), None


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dW, db), each None where not needed, in at most two launches."""
    sizes, grad = sizes.contiguous(), with_rows(dy)
    dx = dw = db = None
    if needs[0]:
        dx = grad_input(grad, saved, weight.resolve_neg(), sizes, activation)
    if needs[1] or needs[2]:
        dw, db = grad_weight(grad, saved, with_rows(x), sizes, activation, needs[1], needs[2])
    return dx, dw, db


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved: Tensor | None,
    sizes: Tensor,
    activation: str,
    save_pre: bool,
    *,
    config: Config | None = None,
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
    key = _product_key(x, weight, bias, saved, sizes, y, activation, save_pre, config)
    launch = _plans.get(key)
    if launch is None:
        described = saved is None and _described(x, _by_rows(weight))
        found = config or product_config(rows, groups, k, n, x.element_size(), described)
        launch = _kept(key, _product_launch(x, weight, saved, sizes, activation, found))
    launch(x, _flat(weight) if launch.described else weight, bias, saved, sizes, y, pre)
    return tensors.rounded(y, x), None if pre is None else tensors.rounded(pre, x)


def _product_key(*call: Any) -> Any:
    """What a launch of a product is made for: its tensors' facts, and all else."""
    return ("product", *tensors.facts_of(*call[:6]), *call[6:])


def _by_rows(weight: Tensor) -> Tensor:
    """The weight, or its transpose where that has contiguous rows."""
    return weight if weight.stride(2) == 1 else weight.transpose(1, 2)


def _flat(weight: Tensor) -> Tensor:
    """A dense weight, or one that is transposed, as the matrix that a descriptor describes."""
    w = _by_rows(weight)
    return w.reshape(-1, w.shape[2])


def _blocks(groups: int) -> tuple[int, int]:
    """How many sizes a program looks at together, and how often until it has seen all and the rows
    that no group owns."""
    at_once = min(padded(groups + 1), _MOST_SIZES)
    return at_once, -(-(groups + 1) // at_once)


def _product_launch(
    x: Tensor, weight: Tensor, saved: Tensor | None, sizes: Tensor, activation: str, c: Config
) -> Launch:
    rows, k = x.shape
    groups, n, _ = weight.shape
    turned = weight.stride(2) != 1
    dense = (weight.transpose(1, 2) if turned else weight).is_contiguous()
    tma = c.tma and dense and k % c.block_k == 0 and _described(x, weight.mT if turned else weight)
    columns = -(-n // c.block_n)
    rest = (
        *(rows, groups, columns, x.stride(0), *weight.stride(), k, n, *_blocks(groups)),
        *(c.block_m, c.block_n, c.block_k, c.high, tma, turned, activation),
        *(math_of(x.dtype), FORWARD_PRECISION, x.device.type == "cpu"),
    )
    most = -(-rows // c.block_m) + groups + 1
    blocks = None
    if tma:
        tile = [c.block_m, c.block_k]
        w_tile = [c.block_k, c.block_n] if turned else [c.block_n, c.block_k]
        blocks = {0: tile, 1: w_tile, **({} if saved is None else {3: tile})}
    return Launch(
        *(_ragged_kernel, (most * columns,), rest, x.device),
        warps=c.warps,
        stages=c.stages,
        block_shapes=blocks,
    )


def grad_input(
    dy: Tensor,
    saved: Tensor | None,
    weight: Tensor,
    sizes: Tensor,
    activation: str,
    *,
    config: Config | None = None,
) -> Tensor:
    """dx = (dy · act'(pre)) W_g, (T, K), 0 for rows of no group; arguments as of ``product``."""
    turned = weight.transpose(1, 2)
    return product(dy, turned, None, saved, sizes, activation, False, config=config)[0]


def grad_weight(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    sizes: Tensor,
    activation: str,
    need_weight: bool,
    need_bias: bool,
    *,
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(dW (G, N, K), db (G, N)) in dy's dtype, None where not needed; exact zeros for groups
    without rows. dy (T, N) and x (T, K) have contiguous rows; ``saved`` is contiguous."""
    rows, k = x.shape
    n, groups = dy.shape[1], sizes.shape[0]
    if need_weight and config is None and pytorch_pays(dy, saved, x):
        found, only_bias = _by_pytorch(dy, x, sizes), (False, True)
        given = dy, saved, x, sizes, activation
        return found, grad_weight(*given, *only_bias)[1] if need_bias else None
    dw = tensors.vector((groups, n, k), x) if need_weight else None
    db = tensors.vector((groups, n), x) if need_bias else None
    key = _weight_key(dy, saved, x, sizes, dw, db, activation, config)
    launch = _plans.get(key)
    if launch is None:
        described = saved is None and _described(dy, x)
        c = config or weight_config(rows, groups, k, n, x.element_size(), described)
        columns = -(-k // c.block_k) if need_weight else 0
        tma = c.tma and _described(dy, saved, x)
        rest = (
            *(rows, groups, columns, dy.stride(0), x.stride(0), k, n, *_blocks(groups)),
            *(c.block_m, c.block_n, c.block_k, tma, activation, math_of(x.dtype)),
            *(dot_precision(rows), x.device.type == "cpu"),
        )
        grid = (-(-n // c.block_n) * (columns + need_bias), groups)
        tile = [c.block_m, c.block_n]
        blocks = {0: tile, 2: [c.block_m, c.block_k], **({} if saved is None else {1: tile})}
        launch = Launch(
            *(_ragged_weight_kernel, grid, rest, x.device),
            warps=c.warps,
            stages=c.stages,
            block_shapes=blocks if tma else None,
        )
        _kept(key, launch)
    launch(dy, saved, x, sizes, dw, db)
    return (
        None if dw is None else tensors.rounded(dw, x),
        None if db is None else tensors.rounded(db, x),
    )


def pytorch_pays(dy: Tensor, saved: Tensor | None, x: Tensor) -> bool:
    """Whether dW is PyTorch's grouped product: of large weights on Hopper, without an activation.

    On Blackwell that leaves weights of groups without rows unwritten (PyTorch issue 172439).
    """
    size = dy.shape[1] * x.shape[1]
    return (
        saved is None
        and x.dtype == torch.bfloat16
        and (size >= 2 * _LARGE or (size >= _LARGE and x.shape[0] >= _MANY_ROWS))
        and _described(dy, x)
        and tensors.capability_of(x.device)[0] == 9
        and hasattr(torch, "_grouped_mm")
    )


def _by_pytorch(dy: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    ends = sizes.clamp(min=0).cumsum(0).clamp(max=x.shape[0])
    dw: Tensor = torch._grouped_mm(dy.t(), x, offs=ends.to(torch.int32))
    return dw


def _weight_key(*call: Any) -> Any:
    """As ``_product_key``, of a launch for dW and db."""
    return ("weight", *tensors.facts_of(*call[:6]), *call[6:])


def _kept(key: Any, launch: Launch) -> Launch:
    if len(_plans) >= tensors.MAX_PLANS:
        _plans.clear()
    _plans[key] = launch
    return launch
