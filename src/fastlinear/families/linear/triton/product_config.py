"""Launch configurations of products in 16 bits, chosen by a model of their time.

The microseconds of the terms were fitted to launches of drawn configurations on drawn sizes, on an
H200 (``results/nvidia-h200/linear-products.jsonl.gz``). Other chips differ in what fits them and in
their number of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import mul

import torch

from fastlinear.families.linear.triton.gemm_config import UNITS, GemmConfig

_SHARED_OF_A_UNIT, _SHARED_OF_A_BLOCK = 233_472, 1_024  # what one has, and takes besides
_REGISTERS, _THREADS = 65_536, 2048  # of a multiprocessor
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_LEAST_SLICE = 128  # of the depth
_SPLIT_BYTES = 1 << 28  # largest float32 workspace of a split product
_SPLIT_TILES = 4  # for each multiprocessor, at most
_ODD_LOADS, _ODD_SUMS = 64, 32  # of a thread that loads one by one: more of them spill
_TRANSCENDENTAL = ("none", "relu", "leaky_relu", "relu2")  # all activations but these
BLOCKS = (
    *(GemmConfig("pointer", 16, 32, d, 4, 5) for d in (32, 64, 128)),
    GemmConfig("pointer", 16, 32, 256, 4, 4),
    GemmConfig("pointer", 16, 64, 128, 4, 4),
    GemmConfig("pointer", 32, 32, 32, 4, 5),
    GemmConfig("pointer", 32, 32, 128, 4, 4),
    GemmConfig("pointer", 32, 32, 256, 4, 3),
    GemmConfig("pointer", 32, 128, 64, 4, 5),
    *(GemmConfig("pointer", 64, 32, d, 4, 5) for d in (32, 64)),
    GemmConfig("pointer", 64, 32, 128, 4, 4),
    *(GemmConfig("pointer", 64, 64, d, 4, 4) for d in (32, 64, 128)),
    GemmConfig("pointer", 64, 128, 32, 4, 4),
    *(GemmConfig("pointer", 128, 32, d, 4, 4) for d in (32, 64)),
    *(GemmConfig("pointer", 128, 64, d, 4, 4) for d in (32, 64)),
    GemmConfig("pointer", 128, 128, 32, 8, 5),
    GemmConfig("pointer", 128, 128, 64, 8, 3),
    GemmConfig("tma", 64, 64, 128, 4, 5),
    GemmConfig("tma", 128, 64, 64, 4, 5),
    GemmConfig("tma", 128, 64, 128, 4, 4),
    GemmConfig("tma", 128, 128, 64, 4, 5, subtile=2),
    GemmConfig("tma", 128, 128, 64, 4, 3, subtile=2, programs_per_unit=2),
    GemmConfig("tma", 128, 256, 64, 8, 4, subtile=2),
)
"""From the smallest tile up. Others gained a half of a percent together on 700 drawn sizes."""
TERMS = (
    *("start", "tensor descriptors", "waves", "steps", "steps by stages of loads"),
    *("10 million products", "10 million by warps", "100 KB of loads", "100 KB by eight warps"),
    *("10,000 of a one by one", "10,000 of b one by one", "10,000 results"),
    *("10,000 results one by one", "10,000 kept", "10,000 activations"),
    *("sum of slices", "slices", "100 KB of slices", "100 KB of memory"),
)
_US = (
    *(1.49, 0.4062, 0.4349, 0.05487, 0.2563, 0.7777, 8.273, 0.553, 0.1833, 0.7656),
    *(1.452, 0.4128, 0.7754, 0.4639, 0.4144, 0.5863, 0.2515, 1.506, 2.104),
)
"""Microseconds of each of ``TERMS``."""
START_US = _US[0]
"""Microseconds of any product before it computes anything."""


@lru_cache(maxsize=1024)
def config_for(
    rows: int,
    depth: int,
    cols: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    aligned: bool = True,
    wide: tuple[bool, bool] = (True, True),
    one_order: bool = False,
) -> GemmConfig:
    """The configuration of (rows, depth) x (depth, cols) that should take least, in 16 bits.

    Args:
        rows, depth, cols: sizes.
        dtype: bfloat16 or float16.
        capability: of the device.
        aligned: whether both operands and the result have one unit stride and the other a multiple
            of 16 bytes, as tensor descriptors need.
        wide: of each operand, whether 16 bytes are loaded at once.
        one_order: only configurations that add up a row's products in one order.
    """
    units = UNITS.get(capability[0] * 10 + capability[1], UNITS[80])
    able = candidates(rows, depth, cols, dtype, capability, aligned, wide, one_order)
    return min(able, key=lambda c: microseconds(c, rows, depth, cols, wide, units))


def candidates(
    rows: int,
    depth: int,
    cols: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    aligned: bool = True,
    wide: tuple[bool, bool] = (True, True),
    one_order: bool = False,
    blocks: Sequence[GemmConfig] = BLOCKS,
) -> Iterator[GemmConfig]:
    """Those of ``blocks`` that run there and leave no program idle, in slices as well."""
    units = UNITS.get(capability[0] * 10 + capability[1], UNITS[80])
    for c in blocks:
        if c.problem(dtype, capability) is not None or (c.kind == "tma" and not aligned):
            continue
        tall, broad = c.block_r >= 2 * max(rows, 16), c.block_c >= 2 * max(cols, 32)
        if tall or broad or c.block_d >= 2 * max(depth, 32):
            continue
        if not loads_fit(c, wide):
            continue
        tiles = -(-rows // c.block_r) * -(-cols // c.block_c)
        if c.programs_per_unit > 1 and tiles <= units:
            continue
        yield c
        for splits in () if one_order else _SPLITS[1:]:
            sliced = replace(c, splits=splits)
            short = depth < splits * max(_LEAST_SLICE, c.block_d)
            large = tiles * splits > _SPLIT_TILES * units or splits * rows * cols * 4 > _SPLIT_BYTES
            if short or large or sliced.problem(dtype, capability) is not None:
                break
            yield sliced


def microseconds(
    c: GemmConfig,
    rows: int,
    depth: int,
    cols: int,
    wide: tuple[bool, bool] = (True, True),
    units: int = UNITS[90],
) -> float:
    """About how long the product takes, without an activation."""
    return sum(map(mul, _US, terms(c, rows, depth, cols, wide, units)))


def terms(
    c: GemmConfig,
    rows: int,
    depth: int,
    cols: int,
    wide: tuple[bool, bool] = (True, True),
    units: int = UNITS[90],
    activation: str = "none",
    kept: bool = False,
) -> tuple[float, ...]:
    """What the launches take time for, in the order of ``TERMS``: work is that of the
    multiprocessor that has most tiles.

    Args:
        c: the configuration.
        rows, depth, cols, wide: as of ``config_for``.
        units: multiprocessors.
        activation: its name.
        kept: whether the pre-activation is written as well.
    """
    steps = -(-depth // c.block_d)
    slice_steps = -(-steps // min(c.splits, max(steps, 1)))
    splits = -(-steps // max(slice_steps, 1))
    tiles = -(-rows // c.block_r) * -(-cols // c.block_c) * splits
    most = -(-tiles // units)
    waves = -(-most // _resident(c))
    mine, numbers = most * slice_steps, most * c.block_r * c.block_c
    products = mine * c.block_r * c.block_c * c.block_d / 1e7
    pointers = c.kind == "pointer"
    together = c.block_r >= 64  # four warps multiply together
    loads = mine * _loads(c) * 2 / 1e5
    each = (mine * block * c.block_d / 1e4 for block in (c.block_r, c.block_c))
    summed = splits > 1
    read, written = (rows + cols) * depth, rows * cols
    return (
        *(1.0, float(not pointers), float(waves)),
        *(float(waves * slice_steps), waves * slice_steps / max(1, c.stages - 1)),
        *(products * (together and pointers), products * (not together)),
        *(loads, loads * (c.warps == 8)),
        *(0.0 if fine or not pointers else n for n, fine in zip(each, wide, strict=True)),
        *(numbers / 1e4, numbers / 1e4 * (pointers and cols % 16 != 0)),
        numbers * kept / 1e4,
        numbers * (not summed and activation not in _TRANSCENDENTAL) / 1e4,
        *(float(summed), float(summed * splits), summed * splits * written * 8 / units / 1e5),
        (read + written * (1 + kept)) * 2 / units / 1e5,
    )


def loads_fit(c: GemmConfig, wide: tuple[bool, bool]) -> bool:
    """Whether what a thread loads one by one fits its registers."""
    threads = 32 * c.warps
    few = _loads(c) <= _ODD_LOADS * threads and c.block_r * c.block_c <= _ODD_SUMS * threads
    return c.kind == "tma" or all(wide) or few


def _loads(c: GemmConfig) -> int:
    """Numbers of one step."""
    return (c.block_r + c.block_c) * c.block_d


def _resident(c: GemmConfig) -> int:
    """About how many programs a multiprocessor holds at once."""
    if c.kind == "tma":
        return c.programs_per_unit
    threads = 32 * c.warps
    registers = min(255, 56 + c.block_r * c.block_c // threads)
    shared = c.shared_bytes(2) + _SHARED_OF_A_BLOCK
    fit = _REGISTERS // (registers * threads), _THREADS // threads, _SHARED_OF_A_UNIT // shared
    return max(1, min(fit))
