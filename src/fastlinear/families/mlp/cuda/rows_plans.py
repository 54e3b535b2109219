"""Prepared launches of ``rows.cu``, ``row_copies.cu`` and ``row_grads.cu``: fixed shapes, any
addresses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.families.mlp.cuda.rows import (
    COPIES_THREADS,
    GRADS_THREADS,
    MAX_STEPS,
    Rows,
    Shares,
    Widths,
    blocks_of,
)
from fastlinear.kernels.cuda.prepared import MAP_BYTES, Block, Prepared
from fastlinear.native import cuda_driver as driver

_SUMS_THREADS = 256


# weight[] | in, bias[], out[], aside[], saved[], in_saved, in_out | in_stride | rows, steps,
# width[], pitch[]
_IN = MAP_BYTES * MAX_STEPS
_BIAS, _OUT, _ASIDE, _SAVED = (_IN + 8 + 8 * MAX_STEPS * i for i in range(4))
_IN_SAVED = _SAVED + 8 * MAX_STEPS
_IN_STRIDE = _IN_SAVED + 16
_SIZES = _IN_STRIDE + 8
_PITCHES = _SIZES + 4 * (3 + MAX_STEPS)
ROWS_BYTES = -(-(_PITCHES + 4 * (1 + MAX_STEPS)) // 64) * 64


class RowsPlan:
    """A launch of ``rows.cu``. Its tensors, in this order: in, in_saved, in_out, then for each step
    weight, bias, out, aside, saved; None for what there is not.

    Args:
        kernel: in this configuration.
        rows: the configuration.
        widths: of the steps.
        pitches: elements from row to row of in_out, then of every step's out and aside.
        given: tensors of the kind.
    """

    def __init__(
        self,
        kernel: driver.Kernel,
        rows: Rows,
        widths: Widths,
        pitches: Sequence[int],
        given: Sequence[Tensor | None],
    ) -> None:
        into = given[0]
        assert into is not None
        dtype, device, steps = DTYPE_NAMES[into.dtype], kernel.device, len(widths) - 1
        block = Block(ROWS_BYTES)
        for at, tensor in ((_IN, 0), (_IN_SAVED, 1), (_IN_SAVED + 8, 2)):
            block.address(at, tensor)
        for s in range(steps):
            weight = given[3 + 5 * s]
            assert weight is not None
            (n, k), stride, address = weight.shape, weight.stride(0), weight.data_ptr()
            shape = dtype, n, k, stride, 64, 64, address, device
            block.map(MAP_BYTES * s, driver.TensorMap(*shape), 3 + 5 * s)
            for i, at in enumerate((_BIAS, _OUT, _ASIDE, _SAVED), 1):
                block.address(at + 8 * s, 3 + 5 * s + i)
        block.numbers(_IN_STRIDE, "q", into.stride(0))
        block.numbers(_SIZES, f"{2 + len(widths)}i", into.shape[0], steps, *widths)
        block.numbers(_PITCHES, f"{len(pitches)}i", *pitches)
        launch = driver.Launch(kernel, rows.threads, 1, [block.argument])  # type: ignore[list-item]
        blocks = -(-into.shape[0] // (64 * rows.consumers))
        self.blocks = min(blocks, launch.max_clusters())
        launch.set_grid(self.blocks)
        launch.begin_early()
        self.run = Prepared(launch, device, block.places, block.masks)


_COPIES_STRIDES = 16 * MAX_STEPS  # behind from[], to[]: row[], column[] | n[], k[], pitch[]
_COPIES_SIZES = _COPIES_STRIDES + 16 * MAX_STEPS
_COPIES_BYTES = _COPIES_SIZES + 12 * MAX_STEPS
_MOST_COPY_BLOCKS = 1024  # of a matrix


class CopiesPlan:
    """The launch of ``row_copies.cu``. Its tensors: matrices, then as many copies of them.

    Args:
        kernel: compiled.
        given: tensors of the kind.
    """

    def __init__(self, kernel: driver.Kernel, given: Sequence[Tensor]) -> None:
        count = len(given) // 2
        block = Block(_COPIES_BYTES)
        tiles = 1
        for i, (t, copy) in enumerate(zip(given[:count], given[count:], strict=True)):
            block.address(8 * i, i)
            block.address(8 * (MAX_STEPS + i), count + i)
            for j, stride in enumerate(t.stride()):
                block.numbers(_COPIES_STRIDES + 8 * (j * MAX_STEPS + i), "q", stride)
            for j, size in enumerate((*t.shape, copy.stride(0))):
                block.numbers(_COPIES_SIZES + 4 * (j * MAX_STEPS + i), "i", size)
            tiles = max(tiles, blocks_of(t.shape[0]) * blocks_of(t.shape[1]))
        launch = driver.Launch(kernel, COPIES_THREADS, 1, [block.argument])  # type: ignore[list-item]
        launch._config.grid[:2] = min(tiles, _MOST_COPY_BLOCKS), count
        launch.begin_early()
        self.run = Prepared(launch, kernel.device, block.places, block.masks)


# dpre[], input[] | weight[], bias[], parts | parts_at[] | rows, layers, n[], k[], tile[], slices[],
# slice_rows[], first[]
_WEIGHT = 2 * MAP_BYTES * MAX_STEPS
_BIAS_GRAD = _WEIGHT + 8 * MAX_STEPS
_PARTS = _BIAS_GRAD + 8 * MAX_STEPS
_PARTS_AT = _PARTS + 8
_GRADS_SIZES = _PARTS_AT + 8 * MAX_STEPS
_GRADS_BYTES = -(-(_GRADS_SIZES + 4 * (3 + 6 * MAX_STEPS)) // 64) * 64


class GradsPlan:
    """The launches of ``row_grads.cu``. Their tensors, in this order: parts, then for each layer
    dpre, input, dW, db; None for what is not wanted.

    Args:
        kernels: of the products and of the sums.
        shares: of each layer.
        given: tensors of the kind, but for parts.
    """

    def __init__(
        self,
        kernels: tuple[driver.Kernel, driver.Kernel],
        shares: Sequence[Shares],
        given: Sequence[Tensor | None],
    ) -> None:
        first = given[1]
        assert first is not None
        m = first.shape[0]
        rows = [-(-blocks_of(m) // one.slices) * 64 for one in shares]
        counts = [-(-m // each) for each in rows]
        sizes = [c * one.size if c > 1 else 0 for c, one in zip(counts, shares, strict=True)]
        places = [0, *accumulate(sizes)]
        firsts = [0, *accumulate(c * one.tiles for c, one in zip(counts, shares, strict=True))]
        facts = ((one.n, one.k, one.width) for one in shares)
        tables = *zip(*facts, strict=True), counts, rows, firsts

        def prepared(kernel: driver.Kernel, threads: int, grid: Sequence[int]) -> Prepared:
            block = _grads_block(given, kernel.device, m, places, tables)
            launch = driver.Launch(kernel, threads, 1, [block.argument])  # type: ignore[list-item]
            launch._config.grid[: len(grid)] = grid
            launch.begin_early()
            return Prepared(launch, kernel.device, block.places, block.masks)

        self.parts = places[-1]
        self._runs = [prepared(kernels[0], GRADS_THREADS, firsts[-1:])]
        if self.parts:
            grid = -(-max(one.size for one in shares) // _SUMS_THREADS), len(shares)
            self._runs.append(prepared(kernels[1], _SUMS_THREADS, grid))

    def run(self, *tensors: Tensor | None) -> None:
        """Both launches."""
        for launch in self._runs:
            launch(*tensors)


def _grads_block(
    given: Sequence[Tensor | None],
    device: int,
    rows: int,
    places: Sequence[int],
    tables: Sequence[Sequence[int]],
) -> Block:
    """The argument of either launch."""
    block = Block(_GRADS_BYTES)
    block.address(_PARTS, 0)
    layers = (len(given) - 1) // 4
    for i in range(layers):
        for which in (0, 1):
            t = given[1 + 4 * i + which]
            assert t is not None
            shape = DTYPE_NAMES[t.dtype], *t.shape, t.stride(0), 64, 64, t.data_ptr(), device
            at = MAP_BYTES * (i + MAX_STEPS * which)
            block.map(at, driver.TensorMap(*shape), 1 + 4 * i + which)
        block.address(_WEIGHT + 8 * i, 3 + 4 * i)
        block.address(_BIAS_GRAD + 8 * i, 4 + 4 * i)
    block.numbers(_PARTS_AT, f"{layers}q", *places[:layers])
    block.numbers(_GRADS_SIZES, "2i", rows, layers)
    for i, values in enumerate(tables):
        at = _GRADS_SIZES + 8 + 4 * MAX_STEPS * i
        block.numbers(at, f"{len(values)}i", *values)
    return block
