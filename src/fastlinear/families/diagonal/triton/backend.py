"""Backend ``triton`` of diagonal_linear, sm_80 and later; keeps launches of each kind of call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.families.diagonal.reference import Gradients, Needs
from fastlinear.families.diagonal.triton import backward_config, forward_config
from fastlinear.families.diagonal.triton.config import (
    VECTOR,
    Cut,
    DiagonalConfig,
    cut,
    sum_block,
)
from fastlinear.families.diagonal.triton.kernels import (
    _diagonal_linear_bwd_kernel,
    _diagonal_linear_fwd_kernel,
    _sum_parts_kernel,
)
from fastlinear.kernels.triton.early_launch import EarlyLaunch, begins_early

_MAX_PLANS = 1024
_INTERPRETED_UNITS = 2
_plans: dict[Any, Any] = {}


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
    *,
    config: DiagonalConfig | None = None,
) -> Tensor:
    """act(x ∘ w + b) + r in one pass, float32 arithmetic.

    Args:
        x: (M, K) of float32, bfloat16 or float16 with unit stride along K, or along M, as the new
            tensor has then; others are copied.
        weight, bias: (K,), contiguous; bias may be None.
        activation: its name.
        residual: (M, K) laid out as x, or None; others are copied.
        out: contiguous (M, K) to write to, or None for a new tensor.
        config: launch configuration; None picks one.
    """
    turned = out is None and _turned(x) and (residual is None or _turned(residual))
    if turned:
        x, residual = x.t(), None if residual is None else residual.t()
    else:
        x, residual = _unit(x), None if residual is None else _unit(residual)
    y = _empty(x.shape, x) if out is None else out
    if x.numel():
        bits = y.data_ptr() & 15
        key = turned, *_forward_key(x, weight, bias, activation, residual, config, bits)
        launch = _plans.get(key)
        if launch is None:
            launch = _remember(key, _forward_launch(x, activation, residual, config, turned))
        launch(x, weight, bias, residual, y)
    return y.t() if turned else y


def backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    needs: Needs,
    *,
    config: DiagonalConfig | None = None,
) -> Gradients:
    """(dx, dw, db), each None where not needed, in one sweep over dy and x.

    dw and db are summed in float32 in a fixed order: in the sweep's own launch where few rows allow
    it, else by a second small launch over the strips' sums.

    Args:
        dy: (M, K), contiguous.
        x: (M, K) with unit stride along K (others are copied); None where it is not read.
        weight, bias: (K,), contiguous; None where they are not read.
        activation: its name.
        needs: which of dx (M, K), dw (K,) and db (K,) are wanted.
        config: launch configuration; None picks one.
    """
    acts = activation != "none"
    x = _unit(x) if x is not None and (acts or needs[1]) else None
    weight = weight if acts or needs[0] else None
    bias = bias if acts else None
    dx = _empty(dy.shape, dy) if needs[0] else None
    k = dy.shape[1]
    if dy.numel() == 0:
        dw, db = (_empty((k,), dy).zero_() if need else None for need in needs[1:])
        return dx, dw, db
    dw = _empty((k,), dy) if needs[1] else None
    db = _empty((k,), dy) if needs[2] else None
    key = _backward_key(dy, x, weight, bias, activation, needs, config)
    plan = _plans.get(key)
    if plan is None:
        plan = _remember(key, _Backward(dy, x, activation, needs, config))
    plan.run(dy, x, weight, bias, dx, dw, db)
    return dx, dw, db


def _backward_key(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    needs: Needs,
    config: DiagonalConfig | None,
) -> Any:
    bits = tuple([None if t is None else t.data_ptr() & 15 for t in (dy, x, weight, bias)])
    layout = dy.shape, dy.dtype, dy.device, None if x is None else x.stride(0)
    return ("backward", *layout, activation, tuple(needs), bits, config)


class _Backward:
    """Launches of the backward for tensors of one kind.

    Attributes:
        launch: the sweep.
        parts: shape of the strips' sums of dw, and of db, or None where the sweep's are whole.
        sum: what adds them.
    """

    __slots__ = ("launch", "parts", "sum")

    def __init__(
        self,
        dy: Tensor,
        x: Tensor | None,
        activation: str,
        needs: Needs,
        config: DiagonalConfig | None,
    ) -> None:
        m, k = dy.shape
        own = config or backward_config.config_for(m, k, dy.itemsize, activation)
        row_stride = k if x is None or m == 1 else x.stride(0)
        made = backward_config.cut_of(m, k, own, row_stride == k, _units(dy))
        self.launch = EarlyLaunch(
            _diagonal_linear_bwd_kernel,
            (made.blocks * made.strips,),
            (*_sizes(made, k), _stride(made, row_stride, k), *_choices(made, activation, dy, own)),
            dy.device,
            warps=own.warps,
        )
        self.parts: tuple[int, int] | None = None
        summed = needs[1] + needs[2]
        if summed and not own.whole:
            parts = made.strips * made.fold
            self.parts = (parts, k)
            rows, cols, warps = sum_block(parts)
            self.sum = EarlyLaunch(
                _sum_parts_kernel,
                (-(-k // cols), summed),
                (parts, k, rows, cols, "first" if begins_early(dy.device) else ""),
                dy.device,
                warps=warps,
            )

    def run(
        self,
        dy: Tensor,
        x: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """Launch; the results are contiguous, and None where not wanted."""
        if self.parts is None:
            self.launch(dy, x, weight, bias, dx, dw, db)
            return
        dw_part = None if dw is None else _float32(self.parts, dy)
        db_part = None if db is None else _float32(self.parts, dy)
        self.launch(dy, x, weight, bias, dx, dw_part, db_part)
        self.sum(dw_part, db_part, dw, db)


def _forward_launch(
    x: Tensor,
    activation: str,
    residual: Tensor | None,
    config: DiagonalConfig | None,
    turned: bool,
) -> EarlyLaunch:
    """The forward's launch; where x is ``turned``, its rows are features."""
    m, k = x.shape
    own = config or forward_config.config_for(m, k, x.itemsize, activation)
    strides = [k if t is None or m == 1 else t.stride(0) for t in (x, residual)]
    made = cut(m, k, all(s == k for s in strides), _units(x), own)
    more = made.last % VECTOR if made.fold > 1 else 0
    made = replace(made, last=made.last - more)
    return EarlyLaunch(
        _diagonal_linear_fwd_kernel,
        (made.blocks * made.strips,),
        (
            *_sizes(made, k),
            *(_stride(made, s, k) for s in strides),
            *_choices(made, activation, x, own),
            turned,
            turned and k >= made.block_k,
            more,
        ),
        x.device,
        warps=own.warps,
    )


def _sizes(made: Cut, k: int) -> tuple[int, ...]:
    return made.rows, made.width, made.last, k, made.strips, made.blocks


def _stride(made: Cut, row_stride: int, k: int) -> int:
    return made.width if row_stride == k else row_stride


def _choices(made: Cut, activation: str, like: Tensor, config: DiagonalConfig) -> tuple[Any, ...]:
    math = "exact" if like.dtype is torch.float32 else "fast"
    tile = made.block_m, made.block_k, config.stages
    early = config.early if begins_early(like.device) else ""
    return made.fold > 1, activation, math, *tile, made.even, early


def _forward_key(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    config: DiagonalConfig | None,
    out_bits: int,
) -> Any:
    bits = tuple([None if t is None else t.data_ptr() & 15 for t in (x, weight, bias, residual)])
    rest = None if residual is None else residual.stride(0)
    layout = x.shape, x.stride(0), rest, x.dtype, x.device
    return (*layout, activation, bits, out_bits, config)


def _turned(x: Tensor) -> bool:
    """Whether numbers of a feature lie side by side, and those of a row do not."""
    return x.shape[1] > 1 and x.shape[0] > 1 and x.stride(0) == 1 and x.stride(1) >= x.shape[0]


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _units(like: Tensor) -> int:
    return device_facts(like.device).units if like.is_cuda else _INTERPRETED_UNITS


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _float32(shape: tuple[int, int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _remember(key: Any, plan: Any) -> Any:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan
