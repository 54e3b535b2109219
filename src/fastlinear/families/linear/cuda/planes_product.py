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
    Form,
    config_for,
    slice_tiles,
    source,
)
from fastlinear.families.linear.cuda.planes_split import READ, TENSORS, Planes
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import BK
from fastlinear.kernels.cuda.prepared import MAP_BYTES, Block, Plans, Prepared, prepared
from fastlinear.native import cuda_driver as driver

_REMEDY = "Leave the configuration to the model."
_MAPS = 8 * MAP_BYTES
_PRODUCT_BYTES = _MAPS + 14 * 8 + 4 * READ * 8 + 9 * 4
_SUMS_THREADS = 256

plans: Plans[_ProductPlan] = Plans()


class _ProductPlan:
    """Launches of ``planes.cu``. Tensors: those of a and of b; bias, y, pre, parts."""

    def __init__(self, a: Planes, b: Planes, text: str, config: Config, device: int) -> None:
        self._sizes = *sides(a), sides(b)[0]
        m, _, n = self._sizes
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
            for j in range(2 + READ):  # scales, small, what is read
                block.address(_MAPS + 16 * j + 8 * i, first + 4 + j, 15 if j == 0 else 1)
            for j, t in enumerate(planes.source.read):
                strides = (0, 0) if t is None else _along(t, planes.by_columns)
                block.numbers(_MAPS + 112 + 16 * (2 * j + i), "2q", *strides)
        for i in range(4):  # bias, y, pre, parts
            block.address(_MAPS + 80 + 8 * i, 2 * TENSORS + i)
        tiles_m, tiles_n = -(-m // (128 * config.cluster)), -(-n // config.bn)
        slices, each = config.slices, slice_tiles(k, config.slices)
        lines = [planes.scales.shape[1] for planes in (a, b)]
        block.numbers(
            _MAPS + 112 + 4 * READ * 8, "9i", m, n, k, slices, each, tiles_m, tiles_n, *lines
        )
        return block

    def run(self, *given: Tensor | None) -> None:
        """All launches."""
        for launch in self._runs:
            launch(*given)


def sides(planes: Planes) -> tuple[int, int]:
    """Sizes along M (N) and along K."""
    rows, columns = planes.source.numbers.shape
    return (columns, rows) if planes.by_columns else (rows, columns)


def _along(t: Tensor, by_columns: bool) -> tuple[int, int]:
    """Strides along M (N) and along K."""
    rows, columns = t.stride()
    return (columns, rows) if by_columns else (rows, columns)


def _facts(planes: Planes) -> tuple[object, ...]:
    read = [None if t is None else (t.shape, t.stride()) for t in planes.source.read]
    return (*read, planes.by_columns, planes.source.form)


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
    added: bool = False,
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
        added: whether A Bᵀ is added to what ``into`` holds; without bias and activation.
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
    y, pre = into or empty(a.source.numbers, m, n, save_pre)
    parts = a.source.numbers.new_empty(config.slices, m, n) if config.slices > 1 else None
    derived = {p.source.activation for p in (a, b) if p.source.form is not Form.PLAIN}
    if derived:  # of one activation, and the product of none
        (activation,) = derived
    how = bias is None, activation, save_pre, added, config
    key = (_facts(a), _facts(b), *how, device)

    def plan() -> _ProductPlan:
        text = source(
            *(config, activation),
            has_bias=bias is not None,
            save_pre=save_pre,
            added=added,
            turned=(a.by_columns, b.by_columns),
            forms=(a.source.form, b.source.form),
        )
        with compiled.current(device):
            return _ProductPlan(a, b, text, config, device)

    plans.of(key, plan).run(*a.tensors, *b.tensors, bias, y, pre, parts)
    return y, pre
