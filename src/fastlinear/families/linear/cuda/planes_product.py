"""Products of matrices that are split into planes, by ``planes.cu``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear.cuda.planes import (
    KERNEL,
    SUMS_KERNEL,
    THREADS,
    Config,
    config_for,
    slice_tiles,
    source,
)
from fastlinear.families.linear.cuda.planes_split import TENSORS, Planes
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import BK
from fastlinear.kernels.cuda.prepared import MAP_BYTES, Block, Plans, Prepared, prepared
from fastlinear.native import cuda_driver as driver

_REMEDY = "Leave the configuration to the model."
_MAPS = 8 * MAP_BYTES
_PRODUCT_BYTES = _MAPS + 11 * 8 + 6 * 8 + 9 * 4
_SUMS_THREADS = 256

plans: Plans[_ProductPlan] = Plans()


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
        self._sizes = *sides(a), sides(b)[0]
        m, _, n = self._sizes
        derived = a.saved is not None
        if derived:
            activation = a.activation
        ways = a.by_columns, b.by_columns
        text = source(config, activation, biased, save_pre, *ways, derived)
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
            blocks = -(-m * n // _SUMS_THREADS)
            self._runs.append(prepared(text, SUMS_KERNEL, block, _SUMS_THREADS, blocks, device))

    def _block(self, a: Planes, b: Planes, config: Config, device: int) -> Block:
        m, k, n = self._sizes
        block = Block(-(-_PRODUCT_BYTES // 64) * 64)
        for i, (planes, box) in enumerate(((a, 128), (b, config.bn))):
            rows = BK if planes.by_columns else box
            first = TENSORS * i
            for j, plane in enumerate(planes[:4]):
                parts = config.cluster if i else 1
                of = driver.TensorMap(
                    *("float16", plane.shape[0], plane.shape[1], plane.stride(0)),
                    *(rows // parts, 64, plane.data_ptr(), device),
                )
                block.map(MAP_BYTES * (4 * i + j), of, first + j)
            for j in range(3):  # scales, small, numbers
                block.address(_MAPS + 16 * j + 8 * i, first + 4 + j, 15 if j == 0 else 1)
            block.numbers(_MAPS + 88 + 16 * i, "2q", *_along(planes.numbers, planes.by_columns))
        if a.saved is not None:
            block.address(_MAPS + 48, 7)
            block.numbers(_MAPS + 120, "2q", *_along(a.saved, a.by_columns))
        for i in range(4):  # bias, y, pre, parts
            block.address(_MAPS + 56 + 8 * i, 2 * TENSORS + i)
        tiles_m, tiles_n = -(-m // (128 * config.cluster)), -(-n // config.bn)
        slices, each = config.slices, slice_tiles(k, config.slices)
        lines = [planes.scales.shape[1] for planes in (a, b)]
        block.numbers(_MAPS + 136, "9i", m, n, k, slices, each, tiles_m, tiles_n, *lines)
        return block

    def run(self, *given: Tensor | None) -> None:
        """All launches."""
        for launch in self._runs:
            launch(*given)


def sides(planes: Planes) -> tuple[int, int]:
    """Sizes along M (N) and along K."""
    rows, columns = planes.numbers.shape
    return (columns, rows) if planes.by_columns else (rows, columns)


def _along(t: Tensor, by_columns: bool) -> tuple[int, int]:
    """Strides along M (N) and along K."""
    rows, columns = t.stride()
    return (columns, rows) if by_columns else (rows, columns)


@cache
def _units(device: int) -> int:
    return device_facts(torch.device("cuda", device)).units


def empty(like: Tensor, m: int, n: int, save_pre: bool) -> tuple[Tensor, Tensor | None]:
    """Memory for a product, and beside it for what comes before its activation."""
    return like.new_empty(m, n), like.new_empty(m, n) if save_pre else None


def product(
    a: Planes,
    b: Planes,
    bias: Tensor | None = None,
    activation: str = "none",
    save_pre: bool = False,
    *,
    into: tuple[Tensor, Tensor | None] | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(act(A Bᵀ + bias), A Bᵀ + bias or None), both (M, N).

    Args:
        a: of A (M, K), or by columns of (K, M).
        b: of B (N, K), or by columns of (K, N).
        bias: (N,) float32, or None.
        activation: its name.
        save_pre: whether to return the second.
        into: memory for both, dense.
        config: how the product is shared out; None lets a model choose.

    Raises:
        UnsupportedError: for a configuration that cannot serve.
    """
    (m, k), (n, depth) = sides(a), sides(b)
    assert k == depth, "both are of one K"
    device = a.high.device.index
    config = config or config_for(m, n, k, _units(device))
    if (why := config.invalid(k)) is not None:
        raise UnsupportedError("linear_act (planes backend)", "a configuration", why, _REMEDY)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    y, pre = into or empty(a.numbers, m, n, save_pre)
    parts = a.numbers.new_empty(config.slices, m, n) if config.slices > 1 else None
    facts = [(p.numbers.shape, p.numbers.stride(), p.by_columns) for p in (a, b)]
    saved = None if a.saved is None else (a.saved.stride(), a.activation)
    key = (*facts, saved, bias is None, activation, save_pre, config, device)

    def plan() -> _ProductPlan:
        with compiled.current(device):
            return _ProductPlan(a, b, bias is not None, activation, save_pre, config, device)

    plans.of(key, plan).run(*a.tensors, *b.tensors, bias, y, pre, parts)
    return y, pre
