"""Backend ``planes`` of linear_act: float32 by three products of float16 on Hopper.

Each operand is split into two planes of float16 (one launch, or two where K is the dimension of its
rows), then one launch multiplies. A sum over K that several blocks share is added up by another.
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
    COLUMNS_KERNEL,
    KERNEL,
    MAXIMA_KERNEL,
    ROWS_KERNEL,
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
_MATRIX_BYTES, _SPLIT_BYTES = 80, 176
_LINE_WORDS = 3
_COLUMNS, _LEAST_ROWS = 64, 64  # of a block
_BLOCKS = 8  # of a multiprocessor
_MAPS = 4 * MAP_BYTES
_PRODUCT_BYTES = _MAPS + 8 * 8 + 8 * 4 + 4 * 8
_SUMS_THREADS = 256


class Planes(NamedTuple):
    """A matrix (rows, columns) of float32 as two of float16."""

    high: Tensor
    low: Tensor
    exponents: Tensor  # of rows, or of columns
    numbers: Tensor
    by_columns: bool


_split_plans: Plans[_SplitPlan] = Plans()
_product_plans: Plans[_ProductPlan] = Plans()


def _dense(t: Tensor) -> Tensor:
    """Its rows side by side."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def split(matrices: Sequence[Tensor], by_columns: bool) -> list[Planes]:
    """Planes of one or two matrices (rows, columns) of float32, with an exponent for each row, or
    for each column."""
    matrices = [_dense(t) for t in matrices]
    given, made = [], []
    for t in matrices:
        rows, columns = t.shape
        pitch = -(-columns // 8) * 8
        high, low = (t.new_empty(rows, pitch, dtype=torch.float16)[:, :columns] for _ in range(2))
        exponents = t.new_empty(-(-t.shape[by_columns] // 2) * 2, dtype=torch.int16)
        made.append(Planes(high, low, exponents, t, by_columns))
        given += [t, high, low, exponents]
    facts = [(t.shape, t.stride(0), t.data_ptr() % 16) for t in matrices]
    device = matrices[0].device.index
    key = by_columns, device, *facts

    def plan() -> _SplitPlan:
        with compiled.current(device):
            return _SplitPlan(given, by_columns, device)

    _split_plans.of(key, plan).run(given)
    return made


class _SplitPlan:
    """Launches of ``planes_split.cu``. Tensors: each matrix, its high, low, exponents; parts."""

    def __init__(self, given: Sequence[Tensor], by_columns: bool, device: int) -> None:
        matrices = given[::4]
        longest = max(t.shape[1] for t in matrices)
        lanes = 32 if longest <= 1024 else 256
        first = part = 0
        tables = []
        for t in matrices:
            rows, columns = t.shape
            wide = t.data_ptr() % 16 == 0 and (t.stride(0) % 4 == 0 or rows == 1)
            strips = -(-columns // _COLUMNS)
            most = -(-_BLOCKS * _units(device) // strips)
            chunk = max(_LEAST_ROWS, -(-rows // most))
            chunks = -(-rows // chunk)
            pitch = -(-columns // 8) * 8
            tables.append((rows, columns, pitch, int(wide), first, chunk, chunks, part))
            part += chunks * columns
            first += chunks * strips if by_columns else -(-rows // (SPLIT_THREADS // lanes))
        self._parts = part * _LINE_WORDS if by_columns else 0
        names = (MAXIMA_KERNEL, COLUMNS_KERNEL) if by_columns else (ROWS_KERNEL,)
        self._runs = []
        for name in names:
            block = Block(_SPLIT_BYTES)
            for i, (t, table) in enumerate(zip(matrices, tables, strict=True)):
                at = _MATRIX_BYTES * i
                for j in range(4):
                    block.address(at + 8 * j, 4 * i + j, 15)
                block.numbers(at + 32, "q7i4xq", t.stride(0), *table)
            if by_columns:
                block.address(2 * _MATRIX_BYTES, len(given))
            block.numbers(2 * _MATRIX_BYTES + 8, "i", len(matrices))
            kernel = compiled.kernel(split_source(lanes), name, 0, device)
            launch = driver.Launch(kernel, SPLIT_THREADS, 1, [block.argument])  # type: ignore[list-item]
            launch.set_grid(first)
            launch.begin_early()
            self._runs.append(Prepared(launch, device, block.places, block.masks))

    def run(self, given: list[Tensor]) -> None:
        """All launches."""
        parts = [given[0].new_empty(self._parts)] if self._parts else []
        for launch in self._runs:
            launch(*given, *parts)


class _ProductPlan:
    """Launches of ``planes.cu``. Tensors: high, low, exponents, numbers of a and of b; bias, y,
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
            block.address(_MAPS + 8 * i, 4 * i + 2)
            block.address(_MAPS + 16 + 8 * i, 4 * i + 3)
            strides = planes.numbers.stride()
            along = (strides[1], strides[0]) if planes.by_columns else strides
            block.numbers(_MAPS + 64 + 16 * i, "2q", *along)
        for i in range(4):  # bias, y, pre, parts
            block.address(_MAPS + 32 + 8 * i, 8 + i)
        tiles_m, tiles_n = -(-m // (128 * config.cluster)), -(-n // config.bn)
        slices, each = config.slices, slice_tiles(k, config.slices)
        block.numbers(_MAPS + 96, "7i", m, n, k, slices, each, tiles_m, tiles_n)
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
    a, b = split((x, weight), False)
    y, pre = product(a, b, bias, activation, save_pre and activation != "none")
    return y, y if save_pre and activation == "none" else pre


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) weight (N, K)."""
    (a,), (b,) = split((dpre,), False), split((weight,), True)
    return product(a, b)[0]


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) x (M, K)."""
    a, b = split((dpre, x), True)
    return product(a, b)[0]
