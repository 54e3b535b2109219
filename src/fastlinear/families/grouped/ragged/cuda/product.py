"""Products of ragged groups in 16 bits, by ``product.cu``: sources, plans and launches."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.grouped.ragged.cuda.config import (
    Config,
    depth_tiles,
    invalid,
    kept,
    rows_tiles,
    shared_bytes,
)
from fastlinear.families.grouped.ragged.layout import with_rows
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import (
    BK,
    EPILOGUE,
    HALF_DTYPES,
    RAGGED_HEADER,
    THREADS,
    device_source,
    operand_layout,
)
from fastlinear.kernels.cuda.prepared import MAP_BYTES, Block, Plans, Prepared
from fastlinear.kernels.cuda.ragged import RAGGED_BYTES, Ragged
from fastlinear.native import cuda_driver as driver

KERNEL = "ragged_product"
_SOURCE = Path(__file__).with_name("product.cu")
_TABLE = 4 * MAP_BYTES
_BYTES = 9 * 64  # of the parameters, which lie on 64 bytes

plans: Plans[Prepared] = Plans()


def source(
    config: Config,
    dtype: torch.dtype,
    activation: str = "none",
    *,
    has_bias: bool = False,
    save_pre: bool = False,
    b_mn: bool = False,
    of_rows: bool = True,
    groups: int = 1,
) -> str:
    """The complete CUDA C++ source of one specialisation.

    Args:
        b_mn: whether the weight's outputs are its contiguous dimension.
        of_rows: whether groups are of rows of the result; else of the reduction.
        groups: how many: where few groups lie is kept in shared memory.
    """
    macros = {
        "BM": config.bm,
        "STAGES": config.stages,
        "OUT_BUFS": config.out_bufs,
        "CLUSTER": config.cluster,
        "PINGPONG": int(config.pingpong),
        "GROUP_M": config.group_m,
        "HAS_BIAS": int(has_bias),
        "SAVE": int(save_pre),
        "DIRECT": 0,
        "BY_ROWS": int(config.bn > 128),  # there the bias of columns would spill
        "RAGGED": 1 if of_rows else 2,
        "KEPT": kept(config, groups),
    }
    layout = (False, b_mn) if of_rows else (True, True)
    text = device_source(EPILOGUE, macros, config.bn, dtype, activation, *layout)
    return text + RAGGED_HEADER.read_text() + _SOURCE.read_text()


def readable(t: Tensor) -> Tensor:
    """A matrix whose rows TMA reads: itself, or a dense copy."""
    t = with_rows(t)
    if t.stride(0) < t.shape[1] or t.stride(0) % 8 or t.data_ptr() % 16:
        return t.clone(memory_format=torch.contiguous_format)
    return t


def _weight_layout(weight: Tensor) -> tuple[bool, int] | None:
    """(the outputs are contiguous, numbers between rows) of a dense stack, or None."""
    _, n, k = weight.shape
    layout = operand_layout((n, k), weight.stride()[1:])
    if layout is None or weight.data_ptr() % 16:
        return None
    mn, row = layout
    return layout if weight.stride(0) == row * (k if mn else n) or len(weight) == 1 else None


def stacked(weight: Tensor) -> tuple[Tensor, bool, int]:
    """A weight (G, N, K) as TMA reads it, itself or a copy; whether N is the contiguous dimension,
    and numbers between rows."""
    weight = weight.resolve_neg()
    layout = _weight_layout(weight)
    if layout is None:
        weight = weight.clone(memory_format=torch.contiguous_format)
        layout = _weight_layout(weight)
        assert layout is not None
    return weight, *layout


@cache
def _units(device: int) -> int:
    return device_facts(torch.device("cuda", device)).units


def rows_product(
    x: Tensor,
    weight: Tensor,
    groups: Ragged,
    bias: Tensor | None = None,
    activation: str = "none",
    save_pre: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(act(x_g W_gᵀ + b_g), x_g W_gᵀ + b_g or None) of every group's rows, 0 in rows of none.

    Args:
        x: (T, K) bfloat16 or float16, K a multiple of 8.
        weight: (G, N, K) of any strides, N a multiple of 8.
        groups: where groups lie among the T rows.
        bias: (G, N), or None.
        activation: its name.
        save_pre: whether to return the second.
        config: the tiles; None lets a model choose.

    Returns:
        (T, N) each, contiguous; sums are of float32, in a fixed order.

    Raises:
        UnsupportedError: for a configuration that cannot be built.
    """
    x = readable(x)
    weight, b_mn, b_row = stacked(weight)
    (rows, k), n, device = x.shape, weight.shape[1], x.device.index
    if bias is not None:
        bias = bias.resolve_neg().contiguous()
        bias = bias if bias.data_ptr() % 4 == 0 else bias.clone()
    y = x.new_empty((rows, n))
    pre = x.new_empty((rows, n)) if save_pre else None
    if config is None:
        config = rows_tiles(rows, groups.groups, n, k, _units(device)).config
    _check(config)
    how = bias is None, activation, save_pre, config
    key = "rows", x.shape, x.stride(), weight.shape, b_mn, b_row, x.dtype, *how, device

    def plan() -> Prepared:
        text = source(
            *(config, x.dtype, activation),
            has_bias=bias is not None,
            save_pre=save_pre,
            b_mn=b_mn,
            groups=groups.groups,
        )
        block = _Parameters(x.dtype, device)
        block.matrix(0, 0, x, config.bm)
        wide = (k, n) if b_mn else (n, k)
        block.stack(1, 1, weight, wide, b_row, BK if b_mn else config.bn)
        for i, t in ((2, y), (3, pre)):
            if t is not None:
                block.matrix(i, i, t, 16)
        tiles_n = -(-n // config.bn)
        block.rest(groups, n, 0, tiles_n, -(-k // BK))
        return block.prepared(text, config, groups.most_tiles * tiles_n)

    plans.of(key, plan)(x, weight, y, pre, bias, groups.table)
    return y, pre


def depth_product(a: Tensor, b: Tensor, groups: Ragged, config: Config | None = None) -> Tensor:
    """a_gᵀ b_g of every group's rows, (G, M, N), exact zeros of groups without rows.

    Args:
        a: (T, M) bfloat16 or float16, M a multiple of 8.
        b: (T, N) of that dtype, N a multiple of 8.
        groups: where groups lie among the T rows, in order.
        config: as for ``rows_product``.
    """
    a, b = readable(a), readable(b)
    (rows, m), n, device = a.shape, b.shape[1], a.device.index
    y = a.new_empty((groups.groups, m, n))
    if config is None:
        config = depth_tiles(rows, groups.groups, m, n, _units(device)).config
    _check(config)
    key = "depth", a.shape, a.stride(), b.shape, b.stride(), groups.groups, a.dtype, config, device

    def plan() -> Prepared:
        block = _Parameters(a.dtype, device)
        block.matrix(0, 0, a, BK)
        block.matrix(1, 1, b, BK)
        block.stack(2, 2, y, (m, n), n, 16)
        tiles_m, tiles_n = -(-m // config.bm), -(-n // config.bn)
        block.rest(groups, n, tiles_m, tiles_n, 0)
        text = source(config, a.dtype, of_rows=False, groups=groups.groups)
        return block.prepared(text, config, groups.groups * tiles_m * tiles_n)

    plans.of(key, plan)(a, b, y, None, None, groups.table)
    return y


def _check(config: Config) -> None:
    if (why := invalid(config)) is not None:
        raise UnsupportedError(
            "ragged_linear (cuda backend)",
            "a configuration that can be built",
            why,
            "Leave the configuration to the model.",
        )


class _Parameters(Block):
    """``Params`` of ``product.cu``. Tensors: a, b, y, pre, bias, the groups' table."""

    def __init__(self, dtype: torch.dtype, device: int) -> None:
        super().__init__(_BYTES)
        self._groups = 0
        self._kind, self._device = HALF_DTYPES[dtype], device

    def matrix(self, at: int, tensor: int, t: Tensor, box: int) -> None:
        """A descriptor of a matrix, ``box`` rows of 64 numbers at a time."""
        facts = *t.shape, t.stride(0), box, 64, t.data_ptr(), self._device
        self.map(MAP_BYTES * at, driver.TensorMap(self._kind, *facts), tensor)

    def stack(
        self, at: int, tensor: int, t: Tensor, shape: tuple[int, int], row: int, box: int
    ) -> None:
        """A descriptor of a stack of matrices of that shape, whose rows are so many numbers
        apart."""
        facts = *shape, row, box, 64, t.data_ptr(), self._device
        self.map(MAP_BYTES * at, driver.TensorMap(self._kind, *facts, planes=t.shape[0]), tensor)

    def rest(self, groups: Ragged, *counts: int) -> None:
        """The table, addresses and numbers."""
        self.address(_TABLE, 5, 15)
        self.numbers(_TABLE + 8, "3i", *groups.facts)
        self._groups = groups.groups
        at = _TABLE + RAGGED_BYTES
        for i, (tensor, mask) in enumerate(((4, 3), (2, 15), (3, 15))):
            self.address(at + 8 * i, tensor, mask)
        self.numbers(at + 24, "4i", *counts)

    def prepared(self, text: str, config: Config, tiles: int) -> Prepared:
        """The launch, of at most so many tiles."""
        device = self._device
        with compiled.current(device):
            shared = shared_bytes(config, self._groups)
            kernel = compiled.kernel(text, KERNEL, shared, device)
            launch = driver.Launch(kernel, THREADS, 1, [self.argument])  # type: ignore[list-item]
            launch.set_grid(min(tiles, launch.max_clusters()))
            launch.begin_early()
            return Prepared(launch, device, self.places, self.masks)
