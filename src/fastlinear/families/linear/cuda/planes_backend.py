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
    BY_COLUMNS,
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
_MATRIX_BYTES = 72
_SPLIT_BYTES = 2 * _MATRIX_BYTES + 8
_MAPS = 4 * MAP_BYTES
_PRODUCT_BYTES = _MAPS + 8 * 8 + 4 * 8 + 9 * 4
_SUMS_THREADS = 256


class Planes(NamedTuple):
    """A matrix (rows, columns) of float32 as two of float16."""

    high: Tensor
    low: Tensor
    scales: Tensor  # (segments of 64 along K, rows or columns and more); -1 where there are none
    numbers: Tensor
    by_columns: bool


_split_plans: Plans[_SplitPlan] = Plans()
_product_plans: Plans[_ProductPlan] = Plans()


def _dense(t: Tensor) -> Tensor:
    """Its rows side by side."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def split(matrices: Sequence[Tensor], by_columns: Sequence[bool]) -> list[Planes]:
    """Planes of one or two matrices (rows, columns) of float32.

    Args:
        matrices: what to split.
        by_columns: of each, whether K is the dimension of its rows: a scale belongs to 64 numbers
            of a column then, else of a row.
    """
    matrices = [_dense(t) for t in matrices]
    given, made = [], []
    for t, turned in zip(matrices, by_columns, strict=True):
        rows, columns = t.shape
        pitch = _up(columns, 8)
        high, low = (t.new_empty(rows, pitch, dtype=torch.float16)[:, :columns] for _ in range(2))
        k, lines = (rows, columns) if turned else (columns, rows)
        scales = t.new_empty(_up(k, BK) // BK, _up(lines, BK))
        made.append(Planes(high, low, scales, t, turned))
        given += [t, high, low, scales]
    facts = [
        (t.shape, t.stride(0), t.data_ptr() % 16, turned)
        for t, turned in zip(matrices, by_columns, strict=True)
    ]
    device = matrices[0].device.index

    def plan() -> _SplitPlan:
        with compiled.current(device):
            return _SplitPlan(made, device)

    _split_plans.of((device, *facts), plan).run(*given)
    return made


class _SplitPlan:
    """The launch of ``planes_split.cu``. Tensors: each matrix, its high, low, scales."""

    def __init__(self, made: Sequence[Planes], device: int) -> None:
        block = Block(_SPLIT_BYTES)
        first = 0
        for i, planes in enumerate(made):
            t = planes.numbers
            rows, columns = t.shape
            wide = t.data_ptr() % 16 == 0 and (t.stride(0) % 4 == 0 or rows == 1)
            across, lines = _up(columns, BK) // BK, planes.scales.shape[1]
            at = _MATRIX_BYTES * i
            for j in range(4):
                block.address(at + 8 * j, 4 * i + j, 15)
            table = (rows, columns, planes.high.stride(0), lines, wide, planes.by_columns)
            block.numbers(at + 32, "q8i", t.stride(0), *map(int, table), first, across)
            first += _up(rows, BK) // BK * across
        block.numbers(2 * _MATRIX_BYTES, "i", len(made))
        kernel = compiled.kernel(split_source(), SPLIT_KERNEL, 0, device)
        launch = driver.Launch(kernel, SPLIT_THREADS, 1, [block.argument])  # type: ignore[list-item]
        launch.set_grid(first)
        launch.begin_early()
        self.run = Prepared(launch, device, block.places, block.masks)


class _ProductPlan:
    """Launches of ``planes.cu``. Tensors: high, low, scales, numbers of a and of b; bias, y,
    pre, parts."""

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
            for j, plane in enumerate(planes[:2]):
                parts = config.cluster if i else 1
                of = driver.TensorMap(
                    *("float16", plane.shape[0], plane.shape[1], plane.stride(0)),
                    *(rows // parts, 64, plane.data_ptr(), device),
                )
                block.map(MAP_BYTES * (2 * i + j), of, 4 * i + j)
            block.address(_MAPS + 8 * i, 4 * i + 2, 15)
            block.address(_MAPS + 16 + 8 * i, 4 * i + 3)
            strides = planes.numbers.stride()
            along = (strides[1], strides[0]) if planes.by_columns else strides
            block.numbers(_MAPS + 64 + 16 * i, "2q", *along)
        for i in range(4):  # bias, y, pre, parts
            block.address(_MAPS + 32 + 8 * i, 8 + i)
        tiles_m, tiles_n = -(-m // (128 * config.cluster)), -(-n // config.bn)
        slices, each = config.slices, slice_tiles(k, config.slices)
        lines = [planes.scales.shape[1] for planes in (a, b)]
        block.numbers(_MAPS + 96, "9i", m, n, k, slices, each, tiles_m, tiles_n, *lines)
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

    _product_plans.of(key, plan).run(*a[:4], *b[:4], bias, y, pre, parts)
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
    a, b = split((x, weight), BY_COLUMNS["forward"])
    y, pre = product(a, b, bias, activation, save_pre and activation != "none")
    return y, y if save_pre and activation == "none" else pre


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) weight (N, K)."""
    a, b = split((dpre, weight), BY_COLUMNS["grad_input"])
    return product(a, b)[0]


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) x (M, K)."""
    a, b = split((dpre, x), BY_COLUMNS["grad_weight"])
    return product(a, b)[0]
