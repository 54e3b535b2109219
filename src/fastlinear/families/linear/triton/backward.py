"""The whole backward of linear_act in one Triton launch, or in two where dpre is formed first.

Else dpre is never written: what needs it forms it. Few rows of x lie in one tile, all of them.
Importing this file imports Triton, so it is imported lazily.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.activations.reference import math_of
from fastlinear.families.linear import reference
from fastlinear.families.linear.triton import backend as products
from fastlinear.families.linear.triton.backward_config import Config, config_for
from fastlinear.families.linear.triton.config import TF32X3_MIN_ROWS, TilesConfig, dot_precision
from fastlinear.families.linear.triton.few_rows import _backward_kernel, _few_rows_backward_kernel
from fastlinear.families.linear.triton.gemm import _sum_slices_kernel
from fastlinear.families.linear.triton.tiles_backward import _tiles_backward_kernel
from fastlinear.kernels.triton.launch import Launch

__all__ = ["backward"]

Tensor = torch.Tensor
_MAX_PLANS = 4096
_DEEP = 4096  # depth of a float32 sum beyond which it is carried

_plans: dict[Any, Any] = {}


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
    *,
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dW, db) of y = act(x Wᵀ + b) in one launch, or two where N is cut into slices for dx.

    Args:
        dy: (M, N) of any strides, any M.
        saved: (M, N), columns contiguous: what the activation saves,
            its output y or the pre-activation; None for ``"none"``.
        x: (M, K) of any strides, dtype of dy; may be None where dW is not needed.
        weight: (N, K) of any strides, dtype of dy; may be None where dx is not needed.
        activation: name of the activation.
        needs: which of dx, dW and db are wanted.
        config: launch configuration; None picks ``backward_config.config_for``.

    Returns:
        dx (M, K), dW (N, K) and db (N,) in dy's dtype, contiguous; None where not wanted. Products
        accumulate in float32 over dpre rounded to dy's dtype, db over dpre before rounding.
        Deterministic: slices are summed in a fixed order.
    """
    if activation == "none":
        saved = None
    M, N = dy.shape
    like = x if weight is None else weight
    K = 0 if like is None else like.shape[1]
    if not M * N * K:
        return reference.backward(dy, saved, x, weight, activation, needs)
    if config is None:
        wide = _wide(x, weight), _wide(dy, saved)
        config = config_for(M, K, N, dy.dtype, activation, wide)
    if config.dpre_first and saved is not None:
        dpre, db = products.grad_pre(dy, saved, activation, needs[2])
        if not any(needs[:2]):
            return None, None, db
        dx, dw, _ = backward(dpre, None, x, weight, "none", (*needs[:2], False), config=config)
        return dx, dw, db
    make = products._empty
    dx = make((M, K), dy) if needs[0] else None
    dw = make((N, K), dy) if needs[1] else None
    db = make((N,), dy) if needs[2] else None
    plan = _plan(dy, saved, x, weight, activation, needs, config)
    plan.run(dy, saved, x, weight, dx, dw, db)
    return (
        None if dx is None else products._rounded(dx, dy),
        None if dw is None else products._rounded(dw, dy),
        None if db is None else products._rounded(db, dy),
    )


def _wide(*operands: Tensor | None) -> bool:
    """Whether each has one unit stride, and rows of whole multiples of 16 elements."""
    return all(min(t.stride()) == 1 and not max(t.stride()) % 16 for t in operands if t is not None)


def _plan(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    activation: str,
    needs: tuple[bool, bool, bool],
    config: Config,
) -> _Backward:
    key = (
        dy.shape,
        dy.stride(),
        dy.dtype,
        dy.device,
        x is None and weight is None,
        activation,
        needs,
        dy.data_ptr() & 15,
        None if saved is None else (saved.stride(0), saved.data_ptr() & 15),
        None if x is None else (x.shape, x.stride(), x.data_ptr() & 15),
        None if weight is None else (weight.shape, weight.stride(), weight.data_ptr() & 15),
        config,
    )
    plan: _Backward | None = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _Backward(dy, saved, x, weight, activation, needs, config)
    return plan


class _Backward:
    """Launches of the backward for tensors of one kind."""

    __slots__ = ("_launch", "_parts", "_sum")

    def __init__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor | None,
        weight: Tensor | None,
        activation: str,
        needs: tuple[bool, bool, bool],
        config: Config,
    ) -> None:
        M, N = dy.shape
        like = x if weight is None else weight
        assert like is not None
        K = like.shape[1]
        common = (
            *(N, K, *dy.stride(), 0 if saved is None else saved.stride(0)),
            *((0, 0) if x is None else x.stride()),
            *((0, 0) if weight is None else weight.stride()),
        )
        how = (activation, math_of(dy.dtype))
        precisions = (dot_precision(N), "tf32x3" if M >= TF32X3_MIN_ROWS else "ieee")
        interpreted = dy.device.type == "cpu"
        slices = 1
        if isinstance(config, TilesConfig):
            c = config
            dx_programs = -(-M // c.dx_m) * -(-K // c.dx_k) if needs[0] else 0
            dw_programs = -(-N // c.dw_n) * -(-K // c.dw_k) if needs[1] else 0
            db_programs = -(-N // c.dw_n) if needs[2] else 0
            kernel, grid = _tiles_backward_kernel, (dx_programs + dw_programs + db_programs, 1)
            rest = (
                *(M, *common, dx_programs, dw_programs, *how, *precisions),
                *(c.dx_m, c.dx_k, c.dx_n, c.dw_n, c.dw_k, c.dw_m, c.chunks),
                *(dy.dtype is torch.float32 and depth > _DEEP for depth in (M, N)),
                *(M % (c.dw_m * c.chunks) == 0, N % (c.dx_n * c.chunks) == 0, interpreted),
            )
        else:
            slices = config.slices if needs[0] else 1
            blocks = -(-N // config.dx_n)
            slice_n = -(-blocks // min(slices, blocks)) * config.dx_n
            slices = -(-N // slice_n)
            strips = -(-K // config.dx_k)
            if config.kind == "fma":
                kernel, grid = _few_rows_backward_kernel, (strips, slices)
                rest = (*common, slice_n, M, *how, config.dx_k, config.dx_n, config.stages)
            else:
                dx_programs = strips * slices if needs[0] else 0
                tiles = -(-N // config.dw_n) * (-(-K // config.dw_k) if needs[1] else 1)
                kernel, grid = _backward_kernel, (dx_programs + (tiles if any(needs[1:]) else 0), 1)
                rest = (
                    *(M, *common, dx_programs, slice_n, *how, *precisions),
                    *(config.block_m(M), config.dx_k, config.dx_n),
                    *(config.dw_k, config.dw_n, interpreted),
                )
        self._launch = Launch(
            kernel, grid, rest, dy.device, warps=config.warps, stages=config.stages
        )
        self._parts = None
        if slices > 1:
            self._parts = (slices * M, K)
            self._sum = Launch(
                _sum_slices_kernel,
                (-(-M * K // 256),),
                (M * K, K, M * K, slices, "none", math_of(dy.dtype), 256),
                dy.device,
                warps=4,
            )

    def run(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor | None,
        weight: Tensor | None,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """Launch; dx (M, K), dw (N, K) and db (N,) are contiguous, and None where not wanted."""
        if self._parts is None:
            self._launch(dy, saved, x, weight, dx, dw, db)
            return
        parts = torch.empty(self._parts, dtype=torch.float32, device=dy.device)
        self._launch(dy, saved, x, weight, parts, dw, db)
        self._sum(parts, None, dx, None)
