"""Every way to launch a product in 16 bits, and what its launches take time for."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from operator import mul

import torch

from fastlinear.families.linear.triton.gemm_config import UNITS, GemmConfig

_SHARED_OF_A_UNIT, _SHARED_OF_A_BLOCK = 233_472, 1_024  # what one has, and takes besides
_REGISTERS, _THREADS = 65_536, 2048  # of a multiprocessor
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_LEAST_SLICE = 128  # of the depth
_SPLIT_BYTES = 1 << 28  # largest float32 workspace of a split product
_TILES = 24  # for each multiprocessor: more than that are too small
_L2_BYTES = 40_000_000
_TRANSCENDENTAL = ("none", "relu", "leaky_relu", "relu2")  # all activations but these
TERMS = (
    *("start", "persistent", "waves", "steps", "10 million products", "10 million by warps"),
    *("100 KB of loads", "10,000 loads one by one", "10,000 results", "10,000 kept"),
    *("10,000 activations", "slices", "100 KB of slices", "100 KB of memory"),
    "100 KB of shared tiles",
)
_US = (2.0, 2.0, 0.7, 0.25, 2.2, 5.0, 0.5, 0.3, 0.05, 0.05, 0.05, 2.0, 3.0, 2.5, 0.2)
"""Microseconds of each of ``TERMS``: guesses, by which a sweep draws."""


@lru_cache
def _every() -> tuple[GemmConfig, ...]:
    blocks = product(
        (16, 32, 64, 128), (32, 64, 128, 256), (32, 64, 128, 256), (4, 8), (2, 3, 4, 5)
    )
    pointer = [GemmConfig("pointer", *block) for block in blocks]
    how = product((64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4, 5))
    tma = [
        GemmConfig("tma", *block, subtile=part, programs_per_unit=programs)
        for block, part, programs in product(how, (1, 2), (1, 2))
    ]
    able = [c for c in (*pointer, *tma) if c.problem(torch.bfloat16, (9, 0)) is None]
    return tuple(c for c in able if _moderate(c))


def _moderate(c: GemmConfig) -> bool:
    """Whether threads have neither too little nor too much to hold."""
    threads = 32 * c.warps
    sums, loads = c.block_r * c.block_c, (c.block_r + c.block_c) * c.block_d
    if c.kind == "tma" and c.block_r * c.block_c > 64 * 64 * c.warps:
        return False
    return 4 * threads <= sums and 8 * threads <= loads <= 192 * threads


def candidates(
    rows: int, depth: int, cols: int, aligned: bool = True, one_order: bool = False
) -> list[GemmConfig]:
    """Configurations of (rows, depth) x (depth, cols) on a Hopper that leave no program idle.

    Args:
        rows, depth, cols: sizes.
        aligned: as for ``config.config_for``.
        one_order: only those that add up a row's products as the others of them do.
    """
    found = []
    for c in _every():
        if not aligned and (c.kind == "tma" or c.block_c > 64 or c.block_r > 64 or c.block_d > 128):
            continue
        tall, wide = c.block_r >= 2 * max(rows, 16), c.block_c >= 2 * max(cols, 32)
        if tall or wide or c.block_d >= 2 * max(depth, 32):
            continue
        tiles = -(-rows // c.block_r) * -(-cols // c.block_c)
        largest = 128 * 128 if aligned else 64 * 64
        if tiles > _TILES * UNITS[90] and c.block_r * c.block_c < min(largest, max(rows, 16) * 64):
            continue
        if c.kind == "tma" and c.programs_per_unit > 1 and tiles <= UNITS[90]:
            continue
        for splits in (1,) if one_order else _SPLITS:
            if splits > 1:
                short = depth < splits * max(_LEAST_SLICE, c.block_d)
                if short or tiles * splits > 4 * UNITS[90]:
                    break
                if splits * rows * cols * 4 > _SPLIT_BYTES:
                    break
            found.append(replace(c, splits=splits))
    return found


def _resident(c: GemmConfig, size: int) -> int:
    """About how many programs a multiprocessor holds at once."""
    if c.kind == "tma":
        return c.programs_per_unit
    threads = 32 * c.warps
    registers = min(255, 56 + c.block_r * c.block_c // threads)
    shared = c.shared_bytes(size) + _SHARED_OF_A_BLOCK
    fit = _REGISTERS // (registers * threads), _THREADS // threads, _SHARED_OF_A_UNIT // shared
    return max(1, min(fit))


def microseconds(
    c: GemmConfig,
    rows: int,
    depth: int,
    cols: int,
    activation: str = "none",
    kept: bool = False,
    aligned: bool = True,
) -> float:
    """About how long the product takes on a Hopper."""
    return sum(map(mul, _US, terms(c, rows, depth, cols, activation, kept, aligned)))


def terms(
    c: GemmConfig,
    rows: int,
    depth: int,
    cols: int,
    activation: str = "none",
    kept: bool = False,
    aligned: bool = True,
) -> tuple[float, ...]:
    """What the launches take time for, in the order of ``TERMS``: work is that of the
    multiprocessor that has most tiles.

    Args:
        c: the configuration.
        rows, depth, cols: sizes.
        activation: its name; slices' sum ends with it.
        kept: whether the pre-activation is written as well.
        aligned: as for ``candidates``.
    """
    size, units = 2, UNITS[90]
    steps = -(-depth // c.block_d)
    slice_steps = -(-steps // min(c.splits, steps))
    splits = -(-steps // slice_steps)
    tiles = -(-rows // c.block_r) * -(-cols // c.block_c) * splits
    most = -(-tiles // units)
    waves = -(-most // _resident(c, size))
    numbers, mine = c.block_r * c.block_c, most * slice_steps
    by_group = c.block_r >= 64  # four warps multiply together
    products = mine * numbers * c.block_d / 1e7
    loads = mine * (c.block_r + c.block_c) * c.block_d
    read, written = (rows + cols) * depth, rows * cols
    own = activation not in _TRANSCENDENTAL
    out = most * numbers if splits == 1 else 0
    summed = splits > 1
    return (
        1.0,
        float(c.kind == "tma"),
        float(waves),
        float(waves * slice_steps),
        products * by_group,
        products * (not by_group),
        loads * size / 1e5,
        0.0 if aligned else loads / 1e4,
        most * numbers / 1e4,
        out * kept / 1e4,
        out * own / 1e4,
        float(summed),
        summed * splits * written * 8 / units / 1e5,
        (read + written * (1 + kept)) * size / units / 1e5,
        max(0, read * size - _L2_BYTES) * -(-rows // c.block_r) / units / 1e5 / 8,
    )
