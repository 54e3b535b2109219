"""Portable Triton backend of linear_act: y = act(x Wᵀ + b), its gradients, on sm_80 and later.

Inputs are 2-D and already validated; validation, reshaping, autograd and selection live in the op.
Importing this file imports Triton, so it is imported lazily.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.activations.reference import math_of
from fastlinear.families.linear.cuda import columns
from fastlinear.families.linear.triton.config import FewRowsConfig, few_rows_config_for, reason_not
from fastlinear.families.linear.triton.elementwise import _copy_rows_kernel, _grad_pre_kernel
from fastlinear.families.linear.triton.few_rows import _few_rows_forward_kernel
from fastlinear.families.linear.triton.gemm_config import GemmConfig
from fastlinear.families.linear.triton.product import (
    Product,
    Turn,
    Turned,
    product,
)
from fastlinear.kernels.cuda.prepared import Plans
from fastlinear.kernels.row_tiles import row_tiles, summed_tiles
from fastlinear.kernels.triton.launch import Launch
from fastlinear.kernels.triton.sums import ColumnSums, constants, units_of

__all__ = ["forward", "grad_input", "grad_pre", "grad_weight", "reason_not"]

Tensor = torch.Tensor

_MAX_PLANS = 4096
_STAGES = 3  # of grad_pre's loads

_plans: dict[Any, Any] = {}
_column_sums: Plans[columns.ColumnSums] = Plans()


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    *,
    config: GemmConfig | FewRowsConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = act(x Wᵀ + b) in one kernel, float32 accumulation, deterministic.

    Args:
        x: (M, K) of any strides; float32, bfloat16 or float16.
        weight: (N, K) of any strides, dtype of x.
        bias: (N,), dtype of x, or None.
        activation: name of the activation.
        save_pre: also return the pre-activation.
        config: launch configuration; None picks ``few_rows_config_for`` for few rows and W as
            nn.Linear keeps it, else ``config_for``.

    Returns:
        y (M, N) contiguous in x's dtype; pre-activation likewise, or None.
    """
    y = _empty((x.shape[0], weight.shape[0]), x)
    pre = _empty((x.shape[0], weight.shape[0]), x) if save_pre else None
    if y.numel() == 0:
        return y, pre
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    plan = _forward_plan(x, weight, bias, activation, save_pre, config)
    plan.run(x, weight.t(), bias, y, pre)
    return _rounded(y, x), None if pre is None else _rounded(pre, x)


def _forward_plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    config: GemmConfig | FewRowsConfig | None,
) -> Any:
    key = (
        x.shape,
        x.stride(),
        weight.shape,
        weight.stride(),
        x.dtype,
        x.device,
        activation,
        save_pre,
        x.data_ptr() & 15,
        weight.data_ptr() & 15,
        None if bias is None else bias.data_ptr() & 15,
        config,
    )
    plan = _plans.get(key)
    if plan is None:
        if config is None and weight.stride(1) == 1:
            config = few_rows_config_for(*x.shape, weight.shape[0], x.dtype)
        if isinstance(config, FewRowsConfig):
            plan = _FewRows(x, weight, activation, config)
        else:
            w = weight.t()
            plan = Product(x, w, activation, config) if config else product(x, w, activation)
        _remember(key, plan)
    return plan


def grad_pre(
    dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """dpre = dy * act'(pre) and db = column sums of dpre, in one pass over M x N.

    Args:
        dy: (M, N) of any strides.
        saved: (M, N), columns contiguous: what the activation saves,
            its output y or the pre-activation; None for ``"none"``.
        activation: name of the activation.
        need_bias_grad: whether db is wanted.

    Returns:
        dpre (M, N) in dy's dtype (dy itself for ``"none"``), and db (N,) or None. db sums the
        float32 values in two fixed-order stages, so it is deterministic.
    """
    M, N = dy.shape
    identity = activation == "none"
    if identity:
        saved = None
        if not need_bias_grad:
            return dy, None
    if M == 0 or N == 0:
        db = torch.zeros(N, dtype=dy.dtype, device=dy.device) if need_bias_grad else None
        return (dy if identity else torch.empty_like(dy)), db
    plan = _grad_pre_plan(dy, saved, activation, need_bias_grad)
    dpre = None if identity else _empty((M, N), dy)
    db = _empty((N,), dy) if need_bias_grad else None
    plan.run(dy, saved, dpre, db)
    return (
        dy if dpre is None else _rounded(dpre, dy),
        None if db is None else _rounded(db, dy),
    )


def wide_grad_pre(
    dy: Tensor,
    saved: Tensor | None,
    activation: str,
    need_bias_grad: bool,
    columns: int,
    need_dpre: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """``grad_pre`` with dpre (M, columns) as a copy of its own, zeros behind the N-th column.

    Also where dpre is dy. Neither M nor N may be 0.
    """
    saved = None if activation == "none" else saved
    M, N = dy.shape
    key = (
        *("wide", dy.shape, dy.stride(), dy.dtype, dy.device, activation, need_bias_grad),
        *(columns, need_dpre, dy.data_ptr() & 15),
        None if saved is None else (saved.stride(0), saved.data_ptr() & 15),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _remember(key, _GradPre(dy, saved, activation, need_bias_grad, columns))
    dpre = dy.new_empty(M, columns) if need_dpre else None
    db = dy.new_empty(N) if need_bias_grad else None
    plan.run(dy, saved, dpre, db)
    return dpre, db


def copy_rows(t: Tensor, rows: int, columns: int) -> Tensor:
    """t (M, K), columns contiguous, as a dense (rows, columns): cut, or filled up with zeros.

    Elements are moved by two or four at once where every row begins at such a multiple.
    """
    out = t.new_empty(rows, columns)
    by = _moved_at_once(t, columns)
    t, into = t.view(by), out.view(by)
    key = "copy", t.shape, t.stride(0), t.dtype, t.device, into.shape, t.data_ptr() & 15
    plan = _plans.get(key)
    if plan is None:
        block_n = min(1024, 1 << (into.shape[1] - 1).bit_length())
        block_m = max(1, 2048 // block_n)
        grid = (-(-into.shape[1] // block_n) * -(-rows // block_m),)
        m, k = t.shape
        rest = (m, k, t.stride(0) - k, rows, into.shape[1] - k, block_m, block_n)
        plan = _remember(key, Launch(_copy_rows_kernel, grid, rest, t.device, warps=4))
    plan(t, into)
    return out


def copy_turned(t: Tensor, columns: int) -> Tensor:
    """t (M, K), rows contiguous along M, as a dense (M, columns), filled up with zeros."""
    turned = t.t()
    key = "turned", t.shape, t.stride(1), t.dtype, t.device, columns, t.data_ptr() & 15
    plan = _plans.get(key)
    if plan is None:
        plan = _remember(key, Turn(turned, columns))
    return plan.run(turned)  # type: ignore[no-any-return]


def _moved_at_once(t: Tensor, columns: int) -> torch.dtype:
    """The widest integers that both t's rows and rows of so many columns are made of."""
    sizes = t.shape[1], t.stride(0), columns, t.storage_offset()
    for dtype in (torch.int64, torch.int32):
        several, left = divmod(dtype.itemsize, t.itemsize)
        if left or t.data_ptr() % dtype.itemsize:  # memory of others' may begin anywhere
            continue
        if several and all(size % several == 0 for size in sizes):
            return dtype
    return torch.int16


def _grad_pre_plan(dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool) -> Any:
    key = (
        dy.shape,
        dy.stride(),
        dy.dtype,
        dy.device,
        activation,
        need_bias_grad,
        dy.data_ptr() & 15,
        None if saved is None else (saved.stride(0), saved.data_ptr() & 15),
    )
    if activation == "none" and columns.serves(dy):
        return _column_sums.of(key, lambda: columns.ColumnSums(dy))
    plan = _plans.get(key)
    if plan is None:
        plan = _remember(key, _GradPre(dy, saved, activation, need_bias_grad))
    return plan


def grad_input(dpre: Tensor, weight: Tensor, *, config: GemmConfig | None = None) -> Tensor:
    """dx = dpre W: (M, N) x (N, K) → (M, K) in dpre's dtype, float32 accumulation.

    Operands may have any strides. Deterministic: slices of N are summed in a fixed order.
    """
    return _grad_product(dpre, weight, config)


def grad_weight(dpre: Tensor, x: Tensor, *, config: GemmConfig | None = None) -> Tensor:
    """dW = dpreᵀ x: (N, M) x (M, K) → (N, K) in dpre's dtype, float32 accumulation.

    Operands may have any strides. Deterministic: slices of M are summed in a fixed order.
    """
    return _grad_product(dpre.t(), x, config)


def _grad_product(a: Tensor, b: Tensor, config: GemmConfig | None) -> Tensor:
    """a @ b with a (rows, depth) and b (depth, cols), split over depth when that pays."""
    out = _empty((a.shape[0], b.shape[1]), a)
    if out.numel() == 0:
        return out
    _product_plan(a, b, config).run(a, b, None, out, None)
    return _rounded(out, a)


def _product_plan(a: Tensor, b: Tensor, config: GemmConfig | None) -> Product | Turned:
    key = (
        a.shape,
        a.stride(),
        b.shape,
        b.stride(),
        a.dtype,
        a.device,
        a.data_ptr() & 15,
        b.data_ptr() & 15,
        config,
    )
    plan: Product | Turned | None = _plans.get(key)
    if plan is None:
        made = Product(a, b, "none", config) if config else product(a, b)
        plan = _remember(key, made)
        assert plan is not None
    return plan


class _FewRows:
    """Launches of the forward for few rows of one kind."""

    __slots__ = ("_launch",)

    def __init__(self, x: Tensor, weight: Tensor, activation: str, config: FewRowsConfig) -> None:
        M, K = x.shape
        N = weight.shape[0]
        self._launch = Launch(
            _few_rows_forward_kernel,
            (-(-N // config.block_n),),
            (
                *(N, K, *x.stride(), weight.stride(0), M, activation, math_of(x.dtype)),
                *(config.block_n, config.block_k, K % config.block_k == 0),
            ),
            x.device,
            warps=config.warps,
        )

    def run(
        self, x: Tensor, w_t: Tensor, bias: Tensor | None, y: Tensor, pre: Tensor | None
    ) -> None:
        """Launch; y (M, N), not empty, and pre, if any, are contiguous; w_t is (K, N)."""
        self._launch(x, w_t, bias, y, pre)


class _GradPre:
    """Launches of grad_pre for tensors of one kind."""

    __slots__ = ("_launch", "_sums")

    def __init__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        activation: str,
        need_bias_grad: bool,
        columns: int | None = None,
    ) -> None:
        m, n = dy.shape
        wide = columns or n
        dense = wide == n and all(t is None or t.is_contiguous() for t in (dy, saved))
        if need_bias_grad:
            sizes = m, n, dy.itemsize
            tiles, chunk_rows, _ = summed_tiles(*sizes, dense, units_of(dy.device))
        else:
            tiles = row_tiles(m, n, dy.itemsize, dense)
            chunk_rows = tiles.least_chunk
        across = -(-(tiles.columns + wide - n) // tiles.block_n)
        self._launch = Launch(
            _grad_pre_kernel,
            (across, -(-tiles.rows // chunk_rows)),
            (
                *(*tiles.sizes, *dy.stride(), 0 if saved is None else saved.stride(0), wide - n),
                *(chunk_rows, *constants(tiles, dense), tiles.cut),
                *(activation, math_of(dy.dtype), tiles.block_m, tiles.block_n, _STAGES),
            ),
            dy.device,
            warps=4,
        )
        self._sums = ColumnSums(tiles, n, chunk_rows, dy.device)

    def run(self, dy: Tensor, saved: Tensor | None, dpre: Tensor | None, db: Tensor | None) -> None:
        """Launch; dpre (M, columns or N) and db (N,) are contiguous, and None where not wanted."""
        part, scratch = self._sums.memory(db)
        self._launch(dy, saved, dpre, part, scratch)
        self._sums.run(part, db)


def _remember(key: Any, plan: Any) -> Any:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised result. The CPU interpreter truncates to bfloat16, so it gets float32."""
    narrow = like.device.type == "cpu" and like.dtype is torch.bfloat16
    dtype = torch.float32 if narrow else like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device)


def _rounded(t: Tensor, like: Tensor) -> Tensor:
    """The result in the dtype of ``like`` (a no-op on a GPU)."""
    return t if t.dtype is like.dtype else t.to(like.dtype)
