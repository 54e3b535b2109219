"""Many rows through a chain in one kernel, forward or backward, 16 bits: kernels and their sizes.

``rows.cu`` carries rows through all layers in shared memory, ``row_grads.cu`` has the gradients of
all weights and biases, ``row_copies.cu`` weights that TMA does not read. Touches no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from math import ceil
from pathlib import Path

import torch

from fastlinear.activations.reference import CODES, CUDA_HEADER, cuda_macros
from fastlinear.activations.reference import activation as activation_of
from fastlinear.kernels.cuda.hopper import ASYNC, SHARED_LIMIT, WORDS, wgmma_source

Widths = tuple[int, ...]

KERNEL, COPIES_KERNEL = "whole_mlp_rows", "whole_mlp_row_copies"
GRADS_KERNEL, SUMS_KERNEL = "whole_mlp_row_grads", "whole_mlp_row_sums"
MAX_STEPS = 16
MAX_WIDTH = 512
COPIES_THREADS = 256
GRADS_THREADS = 384
GRADS_STAGES = 4
GRADS_SHARED = GRADS_STAGES * (6 * 8192 + 16) + 1024

_HERE = Path(__file__)
_SHARED_SOURCES = (WORDS, CUDA_HEADER, ASYNC)
_BLOCK_BYTES = 64 * 128
CHUNK = 4  # blocks of 64 columns that accumulators hold
# Registers of a producer's and of a consumer's threads; 0 where all have what the launch gives.
_REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
_MOST_BLOCKS = {1: 8, 2: 8, 3: 3, 4: 2}  # of columns, whose sums fit those registers

# Microseconds of each of ``terms``, forward and backward, fitted to launches of drawn
# configurations on drawn sizes, on an H200 (``results/nvidia-h200/mlp-rows.jsonl.gz``).
_US = {
    False: (
        *(0.03718, 1.205, 0.0, 0.04757, 1.24, 0.4425, 0.1023, 1.61, 0.1474, 0.04732, 2.194, 0.0),
        *(0.02884, 0.0, 2.665, 0.0),
    ),
    True: (
        *(0.0, 0.9549, 1.067, 0.03918, 0.8203, 1.692, 0.5654, 0.0, 0.8167, 0.7009, 0.0, 0.8454),
        *(0.6073, 0.09696, 0.0, 0.0),
    ),
}
# Guesses by arithmetic, in clocks of a multiprocessor: what wgmma takes for 16 numbers of 64 rows
# and 8 columns, what a block costs beside its products, the launch that adds up slices.
_WGMMA, _ROUND, _SUMS = 4.0, 1500.0, 3500.0
_L2_BYTES = 28.0  # a clock and multiprocessor
_ADDED_BYTES = 16.0  # of sums of slices, written and read again
_CLOCKS_PER_US = 1755.0


def blocks_of(width: int) -> int:
    """Blocks of 64 columns that hold a width."""
    return -(-width // 64)


@dataclass(frozen=True)
class Rows:
    """How a launch of ``rows.cu`` is shared out.

    Attributes:
        consumers: warpgroups of a block, of 64 rows each.
        stages: slots of the ring.
    """

    consumers: int = 2
    stages: int = 4

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.consumers + 1)

    def resident(self, widths: Widths) -> bool:
        """Whether the ring holds all tiles."""
        return self.stages == tiles_of(widths)

    def shared_bytes(self, widths: Widths, backward: bool, staged: bool) -> int:
        """Dynamic shared memory."""
        slots = self.stages * (_slot_blocks(widths) * _BLOCK_BYTES + 16)
        rows = self.consumers * _BLOCK_BYTES * (max(map(blocks_of, widths)) + staged)
        return slots + rows + (0 if backward else 2 * _biases(widths))

    def invalid(self, widths: Widths, backward: bool, staged: bool) -> str | None:
        """Why this configuration cannot be built, or None."""
        steps = len(widths) - 1
        if not 1 <= steps <= MAX_STEPS:
            return f"{steps} layers are not 1 to {MAX_STEPS}"
        if not 1 <= min(widths) <= max(widths) <= MAX_WIDTH:
            return f"widths of {min(widths)} to {max(widths)} are not 1 to {MAX_WIDTH}"
        if self.consumers not in _REGISTERS:
            return f"{self.consumers} consumers"
        blocks = max(map(blocks_of, widths[1:]))
        if blocks > _MOST_BLOCKS[self.consumers]:
            return f"{64 * blocks} columns do not fit the registers of {self.consumers} consumers"
        needed = self.shared_bytes(widths, backward, staged)
        if self.stages < (1 if self.resident(widths) else 2) or needed > SHARED_LIMIT:
            return f"{needed} bytes of shared memory, {self.stages} stages"
        return None

    def terms(self, rows: int, widths: Widths, units: int) -> tuple[float, ...]:
        """What a launch's time is a weighted sum of: for each number of consumers products, blocks
        of results and steps; then rounds' rows, tiles' bytes, one, and what fills the ring."""
        rounds = -(-rows // (64 * self.consumers * units))
        pairs = [(blocks_of(k), blocks_of(n)) for k, n in pairwise(widths)]
        tiles = sum(k * n for k, n in pairs)  # of 64 x 64
        own = (
            rounds * tiles * self.consumers,
            rounds * sum(n for _, n in pairs),
            rounds * len(pairs),
        )
        by_consumers = [v * (c == self.consumers) for c in _REGISTERS for v in own]
        resident = self.resident(widths)
        read = 0.0 if resident else rounds * tiles
        filled = (self.stages if resident else min(self.stages, 2)) * _slot_blocks(widths)
        return (*by_consumers, rounds * pairs[0][0], read, 1.0, filled)

    def microseconds(self, rows: int, widths: Widths, backward: bool, units: int) -> float:
        """How long a launch takes, by a model."""
        terms = self.terms(rows, widths, units)
        return sum(us * n for us, n in zip(_US[backward], terms, strict=True))

    def results_us(
        self, rows: int, widths: Widths, backward: bool, units: int
    ) -> tuple[float, float]:
        """What of it hidden layers' results take, and the last step's."""
        rounds = -(-rows // (64 * self.consumers * units))
        each = _US[backward][3 * list(_REGISTERS).index(self.consumers) + 1] * rounds
        return each * sum(map(blocks_of, widths[1:-1])), each * blocks_of(widths[-1])


def tiles_of(widths: Widths) -> int:
    """Tiles of weights of a round."""
    return sum(blocks_of(k) * -(-blocks_of(n) // CHUNK) for k, n in pairwise(widths))


def _slot_blocks(widths: Widths) -> int:
    """Blocks of 64 columns in the largest tile."""
    return min(CHUNK, max(map(blocks_of, widths[1:])))


def _biases(widths: Widths) -> int:
    """Numbers of all biases, each padded to 64."""
    return 64 * sum(map(blocks_of, widths[1:]))


def candidates(widths: Widths, backward: bool, staged: bool) -> Iterator[Rows]:
    """The largest ring of every number of consumers."""
    for consumers in _REGISTERS:
        rings = (Rows(consumers, stages) for stages in range(tiles_of(widths), 0, -1))
        yield from islice((r for r in rings if r.invalid(widths, backward, staged) is None), 1)


@cache
def rows_for(rows: int, widths: Widths, backward: bool, staged: bool, units: int) -> Rows | None:
    """The configuration that is predicted to take the least time; None where there is none."""
    found = list(candidates(widths, backward, staged))
    return min(found, key=lambda c: c.microseconds(rows, widths, backward, units), default=None)


def source(
    rows: Rows,
    widths: Widths,
    dtype: torch.dtype,
    activation: str,
    final_activation: str,
    backward: bool = False,
    staged: bool = False,
) -> str:
    """The complete CUDA C++ source of one specialisation of ``rows.cu``.

    Args:
        rows: how the launch is shared out.
        widths: of the kernel's steps; of these it keeps how many tiles there are, not their sizes.
        dtype: bfloat16 or float16.
        activation, final_activation: of hidden layers and of the last.
        backward: whether steps are layers from the last to the first, without their activations.
        staged: whether anything is written aside.
    """
    producer, consumer = _REGISTERS[rows.consumers]
    blocks = list(map(blocks_of, widths))
    macros = {
        "IS_BF16": int(dtype == torch.bfloat16),
        "BACKWARD": int(backward),
        "CONSUMERS": rows.consumers,
        "STAGES": rows.stages,
        "SLOT_BLOCKS": _slot_blocks(widths),
        "ROW_BLOCKS": max(blocks),
        "RESIDENT": int(rows.resident(widths)),
        "STAGED": int(staged),
        "RECOMPUTE": int(activation_of(activation).saved == "pre"),
        "BIASES": 0 if backward else _biases(widths),
        "MAX_STEPS": MAX_STEPS,
        "HIDDEN": sum(1 << b for b in set(blocks[1:-1])),
        "LAST": 1 << blocks[-1],
        "PRODUCER_REGISTERS": producer,
        "CONSUMER_REGISTERS": consumer,
        **cuda_macros("fast", activation),
        "FINAL": CODES[final_activation],
    }
    products = {min(b, CHUNK) for b in blocks[1:]} | {b - CHUNK for b in blocks if b > CHUNK}
    return (
        "".join(f"#define {k} {v}\n" for k, v in macros.items())
        + "".join(wgmma_source(64 * b, dtype, False, backward) for b in sorted(products))
        + "".join(path.read_text() for path in (*_SHARED_SOURCES, _HERE.with_name("rows.cu")))
    )


def copies_source() -> str:
    """The complete CUDA C++ source of ``row_copies.cu``."""
    macros = {"MAX_STEPS": MAX_STEPS, **cuda_macros("fast")}
    return "".join(f"#define {k} {v}\n" for k, v in macros.items()) + "".join(
        path.read_text() for path in (*_SHARED_SOURCES, _HERE.with_name("row_copies.cu"))
    )


def grads_source(dtype: torch.dtype) -> str:
    """The complete CUDA C++ source of ``row_grads.cu``."""
    macros = {
        "IS_BF16": int(dtype == torch.bfloat16),
        "STAGES": GRADS_STAGES,
        "MAX_LAYERS": MAX_STEPS,
        **cuda_macros("fast"),
    }
    return (
        "".join(f"#define {k} {v}\n" for k, v in macros.items())
        + wgmma_source(8, dtype, True, False)
        + "".join(wgmma_source(64 * b, dtype, True, True) for b in range(1, CHUNK + 1))
        + "".join(path.read_text() for path in (*_SHARED_SOURCES, _HERE.with_name("row_grads.cu")))
    )


@dataclass(frozen=True)
class Shares:
    """How the gradients of a weight (n, k) and its bias are shared out in ``row_grads.cu``.

    Attributes:
        n, k: features out and in.
        width: blocks of 64 columns of a tile.
        slices: of the rows.
    """

    n: int
    k: int
    width: int
    slices: int

    @property
    def tiles(self) -> int:
        """Of dW."""
        return -(-blocks_of(self.n) // 2) * -(-blocks_of(self.k) // self.width)

    @property
    def size(self) -> int:
        """Numbers of dW and db."""
        return self.n * self.k + self.n


@cache
def shares_for(rows: int, shapes: tuple[tuple[int, int], ...], units: int) -> tuple[Shares, ...]:
    """How all dW (n, k) over so many rows are shared out: the least predicted time."""
    return min(_shares(rows, shapes), key=lambda shares: grads_us(rows, shares, units))


def _shares(rows: int, shapes: tuple[tuple[int, int], ...]) -> Iterator[tuple[Shares, ...]]:
    """What there is to choose from: tiles as wide for all, slices that take about as long."""
    for most in (4, 2, 1):
        widths = [min(most, blocks_of(k)) for _, k in shapes]
        longest = blocks_of(rows) * max(map(_step_clocks, widths))
        for each in sorted({-(-longest // parts) for parts in range(1, 129)}, reverse=True):
            yield tuple(
                Shares(n, k, width, ceil(blocks_of(rows) * _step_clocks(width) / each))
                for (n, k), width in zip(shapes, widths, strict=True)
            )


def _step_clocks(width: int) -> float:
    """What a block takes for 64 rows: its products, or what it reads for them."""
    return max(64 * _WGMMA * width, (2 + width) * _BLOCK_BYTES / _L2_BYTES)


def grads_us(rows: int, shares: Sequence[Shares], units: int) -> float:
    """How long all dW and db take by a model, in microseconds."""
    steps = blocks_of(rows)
    longest = max(-(-steps // one.slices) * _step_clocks(one.width) for one in shares)
    blocks = sum(one.tiles * one.slices for one in shares)
    added = sum(one.size * one.slices for one in shares if one.slices > 1)
    sums = _SUMS + added * _ADDED_BYTES / (_L2_BYTES * units) if added else 0.0
    return (-(-blocks // units) * (longest + _ROUND) + sums) / _CLOCKS_PER_US
