"""Backend ``planes`` of linear_act: float32 by three products of float16 on Hopper.

One launch splits both operands into two planes of float16 each, another multiplies. A sum over K
that several blocks share is added up by a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear.cuda.planes import (
    KERNEL,
    SPLIT_KERNEL,
    SPLIT_THREADS,
    SUMS_KERNEL,
    THREADS,
    Config,
    config_for,
    slice_tiles,
    source,
    split_source,
)
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import BK
from fastlinear.kernels.cuda.prepared import MAP_BYTES, Block, Plans, Prepared
from fastlinear.native import cuda_driver as driver

_REMEDY = "Leave the configuration to the model."
_MATRIX_BYTES = 96
_SPLIT_BYTES = 2 * _MATRIX_BYTES + 8
_MAPS = 8 * MAP_BYTES
_PRODUCT_BYTES = _MAPS + 10 * 8 + 4 * 8 + 9 * 4
_SUMS_THREADS = 256


class Planes(NamedTuple):
    """A matrix (rows, columns) of float32 as matrices of float16.

    Attributes:
        numbers: the matrix.
        high, low: of numbers that are not small beside others of their segment.
        small_high, small_low: of those that are; not written where there are none.
        scales: (segments of 64 along K, rows or columns and more); -1 where there are no planes.
        small: (segments, lines / 64), whether there are small numbers.
        by_columns: whether K is the dimension of rows.
    """

    numbers: Tensor
    high: Tensor
    low: Tensor
    small_high: Tensor
    small_low: Tensor
    scales: Tensor
    small: Tensor
    by_columns: bool


_TENSORS = 7  # of a matrix
_split_plans: Plans[_SplitPlan] = Plans()
_product_plans: Plans[_ProductPlan] = Plans()


def _side_by_side(t: Tensor, by_columns: bool) -> tuple[Tensor, bool]:
    """A matrix whose rows are side by side in memory: itself, turned, or a copy."""
    if t.stride(1) == 1 or t.shape[1] == 1:
        return t, by_columns
    return (t.t(), not by_columns) if t.stride(0) == 1 else (t.contiguous(), by_columns)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def split(matrices: Sequence[Tensor], by_columns: Sequence[bool]) -> list[Planes]:
    """Planes of one or two matrices (rows, columns) of float32.

    Args:
        matrices: what to split; turned where columns are side by side in memory.
        by_columns: of each, whether K is the dimension of its rows: a scale belongs to 64 numbers
            of a column then, else of a row.
    """
    laid = [_side_by_side(*pair) for pair in zip(matrices, by_columns, strict=True)]
    given, made = [], []
    for t, turned in laid:
        rows, columns = t.shape
        pitch = _up(columns, 8)
        planes = t.new_empty(4, rows, pitch, dtype=torch.float16)[:, :, :columns]
        k, lines = (rows, columns) if turned else (columns, rows)
        segments, blocks = _up(k, BK) // BK, _up(lines, BK) // BK
        scales = t.new_empty(segments, blocks * BK)
        small = t.new_empty(segments, blocks, dtype=torch.int32)
        made.append(Planes(t, *planes, scales, small, turned))  # type: ignore[call-arg]
        given += made[-1][:_TENSORS]
    facts = [(t.shape, t.stride(0), t.data_ptr() % 16, turned) for t, turned in laid]
    device = laid[0][0].device.index

    def plan() -> _SplitPlan:
        with compiled.current(device):
            return _SplitPlan(made, device)

    _split_plans.of((device, *facts), plan).run(*given)
    return made


class _SplitPlan:
    """The launch of ``planes_split.cu``. Tensors: those of each matrix."""

    def __init__(self, made: Sequence[Planes], device: int) -> None:
        block = Block(_SPLIT_BYTES)
        first = 0
        for i, planes in enumerate(made):
            t = planes.numbers
            rows, columns = t.shape
            wide = t.data_ptr() % 16 == 0 and (t.stride(0) % 4 == 0 or rows == 1)
            across, lines = _up(columns, BK) // BK, planes.scales.shape[1]
            at = _MATRIX_BYTES * i
            for j in range(_TENSORS):
                block.address(at + 8 * j, _TENSORS * i + j, 15)
            table = (rows, columns, planes.high.stride(0), lines, wide, planes.by_columns)
            block.numbers(at + 8 * _TENSORS, "q8i", t.stride(0), *map(int, table), first, across)
            first += _up(rows, BK) // BK * across
        block.numbers(2 * _MATRIX_BYTES, "i", len(made))
        kernel = compiled.kernel(split_source(), SPLIT_KERNEL, 0, device)
        launch = driver.Launch(kernel, SPLIT_THREADS, 1, [block.argument])  # type: ignore[list-item]
        launch.set_grid(first)
        launch.begin_early()
        self.run = Prepared(launch, device, block.places, block.masks)


class _ProductPlan:
    """Launches of ``planes.cu``. Tensors: those of a and of b; bias, y, pre, parts."""

    def __init__(
        self,
        a: Planes,
        b: Planes,
        biased: bool,
        activation: str,
        save_pre: bool,
        config: Config,
        device: int,
    ) -> None:
        self._sizes = *_sides(a), _sides(b)[0]
        m, _, n = self._sizes
        text = source(config, activation, biased, save_pre, a.by_columns, b.by_columns)
        block = self._block(a, b, config, device)
        kernel = compiled.kernel(text, KERNEL, config.shared_bytes, device)
        launch = driver.Launch(kernel, THREADS, config.cluster, [block.argument])  # type: ignore[list-item]
        tiles = -(-m // (128 * config.cluster)) * -(-n // config.bn)
        blocks = min(tiles * config.slices, launch.max_clusters())
        launch.set_grid(blocks * config.cluster)
        launch.begin_early()
        self._runs = [Prepared(launch, device, block.places, block.masks)]
        if config.slices > 1:
            block = self._block(a, b, config, device)  # each launch has memory of its own
            sums = driver.Launch(
                *(compiled.kernel(text, SUMS_KERNEL, 0, device), _SUMS_THREADS, 1),
                [block.argument],  # type: ignore[list-item]
            )
            sums.set_grid(-(-m * n // _SUMS_THREADS))
            sums.begin_early()
            self._runs.append(Prepared(sums, device, block.places, block.masks))

    def _block(self, a: Planes, b: Planes, config: Config, device: int) -> Block:
        m, k, n = self._sizes
        block = Block(-(-_PRODUCT_BYTES // 64) * 64)
        for i, (planes, box) in enumerate(((a, 128), (b, config.bn))):
            rows = BK if planes.by_columns else box
            first = _TENSORS * i
            for j, plane in enumerate(planes[1:5]):
                parts = config.cluster if i else 1
                of = driver.TensorMap(
                    *("float16", plane.shape[0], plane.shape[1], plane.stride(0)),
                    *(rows // parts, 64, plane.data_ptr(), device),
                )
                block.map(MAP_BYTES * (4 * i + j), of, first + 1 + j)
            block.address(_MAPS + 8 * i, first + 5, 15)
            block.address(_MAPS + 16 + 8 * i, first + 6)
            block.address(_MAPS + 32 + 8 * i, first)
            strides = planes.numbers.stride()
            along = (strides[1], strides[0]) if planes.by_columns else strides
            block.numbers(_MAPS + 80 + 16 * i, "2q", *along)
        for i in range(4):  # bias, y, pre, parts
            block.address(_MAPS + 48 + 8 * i, 2 * _TENSORS + i)
        tiles_m, tiles_n = -(-m // (128 * config.cluster)), -(-n // config.bn)
        slices, each = config.slices, slice_tiles(k, config.slices)
        lines = [planes.scales.shape[1] for planes in (a, b)]
        block.numbers(_MAPS + 112, "9i", m, n, k, slices, each, tiles_m, tiles_n, *lines)
        return block

    def run(self, *given: Tensor | None) -> None:
        """All launches."""
        for launch in self._runs:
            launch(*given)


def _sides(planes: Planes) -> tuple[int, int]:
    """Sizes along M (N) and along K."""
    rows, columns = planes.numbers.shape
    return (columns, rows) if planes.by_columns else (rows, columns)


@cache
def _units(device: int) -> int:
    return device_facts(torch.device("cuda", device)).units


def product(
    a: Planes,
    b: Planes,
    bias: Tensor | None = None,
    activation: str = "none",
    save_pre: bool = False,
    *,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(act(A Bᵀ + bias), A Bᵀ + bias or None), both (M, N).

    Args:
        a: of A (M, K), or by columns of (K, M).
        b: of B (N, K), or by columns of (K, N).
        bias: (N,) float32, or None.
        activation: its name.
        save_pre: whether to return the second.
        config: how the product is shared out; None lets a model choose.

    Raises:
        UnsupportedError: for a configuration that cannot serve.
    """
    (m, k), n = _sides(a), _sides(b)[0]
    device = a.high.device.index
    config = config or config_for(m, n, k, _units(device))
    if (why := config.invalid(k)) is not None:
        raise UnsupportedError("linear_act (planes backend)", "a configuration", why, _REMEDY)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    y = a.numbers.new_empty(m, n)
    pre = a.numbers.new_empty(m, n) if save_pre else None
    parts = a.numbers.new_empty(config.slices, m, n) if config.slices > 1 else None
    facts = [(p.numbers.shape, p.numbers.stride(), p.by_columns) for p in (a, b)]
    key = (*facts, bias is None, activation, save_pre, config, device)

    def plan() -> _ProductPlan:
        with compiled.current(device):
            return _ProductPlan(a, b, bias is not None, activation, save_pre, config, device)

    _product_plans.of(key, plan).run(*a[:_TENSORS], *b[:_TENSORS], bias, y, pre, parts)
    return y, pre


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """y = act(x weightᵀ + bias), and the pre-activation if asked.

    Args:
        x: (M, K) float32, M > 0.
        weight: (N, K).
        bias: (N,) or None.
        activation: a public activation name.
        save_pre: also return x weightᵀ + bias.
    """
    a, b = split((x, weight), (False, False))
    y, pre = product(a, b, bias, activation, save_pre and activation != "none")
    return y, y if save_pre and activation == "none" else pre


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) weight (N, K)."""
    a, b = split((dpre, weight), (False, True))
    return product(a, b)[0]


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) x (M, K)."""
    a, b = split((dpre, x), (True, True))
    return product(a, b)[0]
