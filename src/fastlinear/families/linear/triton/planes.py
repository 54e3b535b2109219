"""Backend ``triton_planes`` of linear_act: float32 by three products of float16, in Triton.

For GPUs whose matrix units multiply 16 bits many times as fast as float32: two launches an operand
make planes of it, one multiplies, and another adds up slices of the depth where there are some.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import math_of
from fastlinear.core.device import device_facts
from fastlinear.families.linear.triton.config import dot_precision
from fastlinear.families.linear.triton.gemm import _sum_slices_kernel
from fastlinear.families.linear.triton.planes_config import COLS, DEPTH, ROWS, slices_of
from fastlinear.families.linear.triton.planes_kernels import (
    _planes_kernel,
    _scales_kernel,
    _split_kernel,
)
from fastlinear.kernels.triton.launch import Launch

_WARPS, _STAGES = 8, 3
_PLAIN_DEPTH, _GROUP = 32, 8
_LINES, _LINES_ALONG, _LINE_STEP = 32, 4, 256  # of a program that finds scales
_SPLIT = 64
_MAX_PLANS = 512


class _Split:
    """Launches that make planes of lines along the depth: (lines, depth) of any strides."""

    def __init__(self, t: Tensor) -> None:
        lines, depth = t.shape
        self.pitch = -(-depth // DEPTH) * DEPTH
        each = _LINES_ALONG if t.stride(1) == 1 else _LINES
        sizes = lines, depth, *t.stride()
        self._scales = Launch(
            _scales_kernel, (-(-lines // each),), (*sizes, each, _LINE_STEP), t.device, warps=4
        )
        grid = -(-lines // _SPLIT), self.pitch // _SPLIT
        rest = *sizes, self.pitch, _SPLIT, _SPLIT
        self._split = Launch(_split_kernel, grid, rest, t.device, warps=4)

    def run(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """High planes, low planes (lines, pitch), and scales (lines)."""
        scales = t.new_empty(len(t))
        high, low = t.new_empty(2, len(t), self.pitch, dtype=torch.float16)
        self._scales(t, scales)
        self._split(t, scales, high, low)
        return high, low, scales


class _Product:
    """Launches of act(a bᵀ + bias): a (rows, depth), b (cols, depth) of any strides."""

    def __init__(self, a: Tensor, b: Tensor, activation: str) -> None:
        (rows, depth), cols = a.shape, len(b)
        self._splits = _Split(a), _Split(b)
        tiles, steps = -(-rows // ROWS) * -(-cols // COLS), -(-depth // DEPTH)
        units = 4 if a.device.type == "cpu" else device_facts(a.device).units
        slices = slices_of(rows, depth, cols, units)
        each = -(-steps // slices) * DEPTH
        own = activation if slices == 1 else "none"  # else the sum of the slices ends with it
        math = math_of(a.dtype)
        self._product = Launch(
            _planes_kernel,
            (tiles, slices),
            (
                *(rows, cols, depth, self._splits[0].pitch, *a.stride(), *b.stride(), each, 3),
                *(own, math, dot_precision(depth), ROWS, COLS, DEPTH, _PLAIN_DEPTH, _GROUP),
            ),
            a.device,
            warps=_WARPS,
            stages=_STAGES,
        )
        self._parts = None
        if slices > 1:
            self._parts = slices, rows, cols
            rest = rows * cols, cols, rows * cols, slices, activation, math, 1024
            self._sum = Launch(
                _sum_slices_kernel, (-(-rows * cols // 1024),), rest, a.device, warps=4
            )

    def run(
        self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None
    ) -> None:
        """Launch; out (rows, cols), not empty, and pre, if any, are dense."""
        planes = *self._splits[0].run(a), *self._splits[1].run(b)
        if self._parts is None:
            self._product(a, b, *planes, bias, out, pre)
            return
        parts = a.new_empty(self._parts)
        self._product(a, b, *planes, None, parts, None)
        self._sum(parts, bias, out, pre)


_plans: dict[object, _Product] = {}


def _product(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str = "none", save: bool = False
) -> tuple[Tensor, Tensor | None]:
    out = a.new_empty(len(a), len(b))
    pre = torch.empty_like(out) if save and activation != "none" else None
    key = (
        *(
            a.shape,
            a.stride(),
            b.shape,
            b.stride(),
            a.device,
            activation,
            bias is None,
            pre is None,
        ),
        *(a.data_ptr() & 15, b.data_ptr() & 15, None if bias is None else bias.data_ptr() & 15),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _Product(a, b, activation)
    plan.run(a, b, bias, out, pre)
    return out, out if save and activation == "none" else pre


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """act(x Wᵀ + b) and, if asked, what comes before act: x (M, K), weight (N, K) float32."""
    return _product(x, weight, bias, activation, save_pre)


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) weight (N, K)."""
    return _product(dpre, weight.t())[0]


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) x (M, K)."""
    return _product(dpre.t(), x.t())[0]
