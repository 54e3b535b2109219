"""The whole backward of a chain in one launch, 16 bits: ``tasks.cu`` and how work is shared out.

Touches no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil
from pathlib import Path

import torch

from fastlinear.activations.reference import CODES, CUDA_HEADER, cuda_macros
from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.mlp.cuda.rows import blocks_of
from fastlinear.kernels.cuda.hopper import ASYNC, SHARED_LIMIT, WORDS, wgmma_source

KERNEL, BEGIN_KERNEL = "mlp_tasks", "mlp_tasks_begin"
MAX_LAYERS = 16
_HERE = Path(__file__)
_BLOCK_BYTES = 64 * 128
_AHEAD = 2
# Clocks of a multiprocessor for 16 numbers of 64 rows and 8 columns.
_WGMMA = 4.0
_CLOCKS_PER_US = 1755.0
_L2_BYTES = 28.0  # a clock and multiprocessor
_BYTES_PER_US = 4e6
# Of each of ``terms``: fitted to 2,409 launches of drawn chains on an H200
# (``results/nvidia-h200/mlp-tasks.jsonl.gz``).
_US = (0.2496, 0.318, 0.6918, 0.8624, 0.402, 4.03, 0.3431, 1.795, 1.892, 1.943, 1.965, 1.759)
START_US = _US[-1]
"""Of a launch what any takes."""


@dataclass(frozen=True)
class Tiles:
    """How tiles are shared out.

    Attributes:
        consumers: warpgroups of a block, of 64 rows of a tile each: 1 or 2.
        bn: columns of a tile, 64 or 128.
        stages: slots of the ring.
    """

    consumers: int = 2
    bn: int = 128
    stages: int = 6

    @property
    def bm(self) -> int:
        """Rows of a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.consumers + 1)

    @property
    def stage_bytes(self) -> int:
        """Of 64 steps of a reduction."""
        return (self.consumers + self.bn // 64) * _BLOCK_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        barriers = 16 * (self.stages + _AHEAD)
        return self.stages * self.stage_bytes + 1024 + barriers + 4 * (_AHEAD + self.consumers)

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor holds: two of the smallest tiles with half of its memory."""
        return 2 if self.threads + self.bn < 384 and 2 * self.shared_bytes < SHARED_LIMIT else 1

    @property
    def sums(self) -> int:
        """Numbers that a consumer keeps of a slice."""
        return (self.bn // 2 + 4) * 128

    @property
    def step_clocks(self) -> float:
        """What a block takes for 64 steps: its products, or what it reads for them."""
        products = 4 * self.consumers * _WGMMA * self.bn / 8
        return max(products, self.stage_bytes / _L2_BYTES)


CANDIDATES = (
    *(Tiles(2, 128, 6), Tiles(2, 64, 8), Tiles(1, 128, 8), Tiles(1, 64, 12)),
    Tiles(1, 64, 6),
)
assert all(t.shared_bytes <= SHARED_LIMIT for t in CANDIDATES)


@dataclass(frozen=True)
class Step:
    """One layer's part.

    Attributes:
        n, k: features out and in.
        down: whether g of the layer below, or dx, is wanted.
        columns: of dW: k; 1 where only db is wanted, 0 where neither is.
    """

    n: int
    k: int
    down: bool
    columns: int


@dataclass(frozen=True)
class Order:
    """The tasks of a launch.

    Attributes:
        begin: the first task of each step down, then of its weights; the end.
        slices, slice_rows: of each step's dW.
        first_sum: number of each step's first tile among those that are summed up.
        sums: how many of these there are.
        parts_at: where each step's parts begin, and where they end.
        graded_columns: of a task that grades dy.
    """

    begin: tuple[int, ...]
    slices: tuple[int, ...]
    slice_rows: tuple[int, ...]
    first_sum: tuple[int, ...]
    sums: int
    parts_at: tuple[int, ...]
    graded_columns: int

    @property
    def tasks(self) -> int:
        """How many there are."""
        return self.begin[-1]


def order(rows: int, steps: Sequence[Step], graded: bool, tiles: Tiles, units: int) -> Order:
    """The tasks of all ``steps``, slices of dW as long as what one goes down takes."""
    row_blocks = ceil(rows / tiles.bm)
    downs = [row_blocks * ceil(s.k / tiles.bn) if s.down else 0 for s in steps]
    grads = [ceil(s.n / tiles.bm) * ceil(s.columns / tiles.bn) for s in steps]
    longest = _longest(rows, steps, tiles, units)
    slices, slice_rows = [], []
    for _ in steps:
        each = min(row_blocks, max(1, ceil(longest / tiles.bm)))
        slice_rows.append(each * tiles.bm)
        slices.append(ceil(row_blocks / each))
    graded_columns = _graded_columns(row_blocks, steps[0].n, units)
    begin = [row_blocks * ceil(steps[0].n / graded_columns) if graded else 0]
    for down, grad, count in zip(downs, grads, slices, strict=True):
        begin += [begin[-1] + down, begin[-1] + down + grad * count]
    counts = [g * tiles.consumers for g in grads]
    first_sum = [0, *accumulate(counts)]
    sizes = (c * s * tiles.sums if s > 1 else 0 for c, s in zip(counts, slices, strict=True))
    parts_at = [0, *accumulate(sizes)]
    return Order(
        *(tuple(begin), tuple(slices), tuple(slice_rows)),
        *(tuple(first_sum[:-1]), first_sum[-1], tuple(parts_at)),
        graded_columns=graded_columns,
    )


def _graded_columns(row_blocks: int, n: int, units: int) -> int:
    """Columns of a task that grades dy: as few as leave two tasks to a multiprocessor, or 64."""
    blocks = blocks_of(n)
    across = min(blocks, ceil(2 * units / row_blocks))
    return 64 * ceil(blocks / across)


def _longest(rows: int, steps: Sequence[Step], tiles: Tiles, units: int) -> int:
    """Rows of a slice: as many tasks of weights as there are blocks, if these are long enough."""
    grads = sum(ceil(s.n / tiles.bm) * ceil(s.columns / tiles.bn) for s in steps)
    slices = max(1, round(2 * units / max(1, grads)))
    return max(ceil(rows / slices), 512)


def terms(
    rows: int, steps: Sequence[Step], graded: bool, tiles: Tiles, units: int
) -> tuple[float, ...]:
    """What a launch's time is a weighted sum of: for each kind of tiles the microseconds of all
    products shared by the multiprocessors; tiles of 128 x 128 that each stores; microseconds of the
    products on the way down, and how many tiles these are of; microseconds of the products of the
    last dW; microseconds of the memory that parts of dW take; steps down; one."""
    found = order(rows, steps, graded, tiles, units)
    each = tiles.step_clocks / _CLOCKS_PER_US
    row_blocks = ceil(rows / tiles.bm)
    products = path = last = 0.0
    rounds = 0
    for s, count, slice_rows in zip(steps, found.slices, found.slice_rows, strict=True):
        down = row_blocks * ceil(s.k / tiles.bn) if s.down else 0
        products += down * blocks_of(s.n) * each
        rounds += ceil(down / (units * tiles.resident))
        path += ceil(down / (units * tiles.resident)) * blocks_of(s.n) * each * tiles.resident
        grads = ceil(s.n / tiles.bm) * ceil(s.columns / tiles.bn) * count
        last = blocks_of(min(slice_rows, rows)) * each if grads else 0.0
        products += grads * blocks_of(min(slice_rows, rows)) * each
    kinds = [(t.consumers, t.bn, t.resident) for t in CANDIDATES]
    own = (tiles.consumers, tiles.bn, tiles.resident)
    stored = found.tasks * tiles.bm * tiles.bn / (units * 128**2)
    parts_us = 2 * 4 * found.parts_at[-1] / _BYTES_PER_US
    downs = float(sum(s.down for s in steps))
    each_kind = [products / units * (own == kind) for kind in kinds]
    return (*each_kind, stored, path, float(rounds), last, parts_us, downs, 1.0)


def microseconds(rows: int, steps: Sequence[Step], graded: bool, tiles: Tiles, units: int) -> float:
    """How long a launch takes, by a model."""
    told = terms(rows, steps, graded, tiles, units)
    return sum(us * t for us, t in zip(_US, told, strict=True))


@cache
def tiles_for(rows: int, steps: tuple[Step, ...], graded: bool, units: int) -> Tiles:
    """The tiles that are predicted to take the least time."""
    return min(CANDIDATES, key=lambda t: microseconds(rows, steps, graded, t, units))


def source(tiles: Tiles, dtype: torch.dtype, activation: str, final_activation: str) -> str:
    """The complete CUDA C++ source of one specialisation of ``tasks.cu``.

    Args:
        tiles: how work is shared out.
        dtype: bfloat16 or float16.
        activation, final_activation: of hidden layers and of the last.
    """
    macros = {
        "IS_BF16": int(dtype == torch.bfloat16),
        "CONSUMERS": tiles.consumers,
        "STAGES": tiles.stages,
        "BN": tiles.bn,
        "MAX_LAYERS": MAX_LAYERS,
        "RECOMPUTE": int(activation_of(activation).saved == "pre"),
        **cuda_macros("fast", activation),
        "FINAL": CODES[final_activation],
    }
    return (
        "".join(f"#define {k} {v}\n" for k, v in macros.items())
        + wgmma_source(tiles.bn, dtype, False, True, "down")
        + wgmma_source(tiles.bn, dtype, True, True, "weights")
        + wgmma_source(8, dtype, True, False, "weights")
        + "".join(p.read_text() for p in (WORDS, CUDA_HEADER, ASYNC, _HERE.with_suffix(".cu")))
    )
