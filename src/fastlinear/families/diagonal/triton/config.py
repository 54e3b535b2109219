"""How diagonal_linear's Triton kernels cut a problem into programs. Imports no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_gpu

VECTOR = 16  # numbers: rows that begin at such multiples are read 16 bytes at a time
_MOST_WASTE = 1 / 16
_MOST_FOLD = 1024
_LEAST_BLOCK = 64
_MOST_ROWS, _MOST_FEATURES = 1 << 30, 1 << 20  # joined rows and their numbers count in 32 bits


@dataclass(frozen=True)
class DiagonalConfig:
    """How one kernel is launched.

    Attributes:
        block_k: most columns of a program, a power of two of at least 16.
        numbers: numbers of x that a program holds at a time, a power of two.
        warps, stages: warps of a program, depth of the load pipeline.
        per_unit: programs wanted for each multiprocessor; 0 gives every tile one of its own.
        early: when the next kernel may begin where devices have such launches: ``"first"`` of all,
            or ``"last"``, before a program's sums.
        whole: whether each program of a sweep sees all rows, so that its sums are whole.
    """

    block_k: int
    numbers: int
    warps: int
    stages: int
    per_unit: int
    early: str = "first"
    whole: bool = False


@dataclass(frozen=True)
class Cut:
    """A problem cut into programs.

    x is read as ``rows`` of ``width`` numbers, ``fold`` rows of K side by side where x is dense, so
    that rows begin aligned and blocks of columns come out even whatever K is.

    Attributes:
        rows, width, fold: as above; the last row may be short.
        last: numbers of the last row.
        block_m, block_k: rows and columns of a tile.
        strips, blocks: programs along the rows and along the columns. A program takes every
            strips-th tile of its columns, so that all programs together walk through memory.
        even: no tile reaches beyond the numbers.
    """

    rows: int
    width: int
    fold: int
    last: int
    block_m: int
    block_k: int
    strips: int
    blocks: int
    even: bool


def sum_block(parts: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps, of the kernel that adds ``parts`` rows of sums."""
    if parts > 64:
        return min(1024, 1 << (parts - 1).bit_length()), 8, 8
    return 1 << max(0, (parts - 1).bit_length()), 64, 4


def cut(m: int, k: int, dense: bool, units: int, config: DiagonalConfig) -> Cut:
    """Cut (M, K) numbers, at least one.

    Args:
        dense: whether rows lie right behind each other.
        units: multiprocessors of the device.
    """
    fold, block_k = _fold(m, k, dense, config.block_k)
    width = fold * k
    rows = -(-m // fold)
    last = m * k - (rows - 1) * width
    block_m = min(max(1, config.numbers // block_k), 1 << (rows - 1).bit_length())
    blocks, tiles = -(-width // block_k), -(-rows // block_m)
    wanted = round(units * config.per_unit / blocks) if config.per_unit else tiles
    strips = max(1, min(tiles, wanted))
    even = width % block_k == 0 and last == width and rows % block_m == 0
    return Cut(rows, width, fold, last, block_m, block_k, strips, blocks, even)


def whole_cut(m: int, k: int, config: DiagonalConfig) -> Cut:
    """A cut in which each program sees all rows of its columns."""
    block_k = min(config.block_k, 1 << (k - 1).bit_length())
    block_m = min(max(1, config.numbers // block_k), 1 << (m - 1).bit_length())
    even = k % block_k == 0 and m % block_m == 0
    return Cut(m, k, 1, k, block_m, block_k, 1, -(-k // block_k), even)


def _fold(m: int, k: int, dense: bool, most: int) -> tuple[int, int]:
    """Rows of K to read as one, and the columns of a block, at most ``most``."""
    if k <= most and k & (k - 1) == 0 and k >= VECTOR:
        return 1, k
    if not dense or m < VECTOR:
        return 1, min(most, max(VECTOR, 1 << (k - 1).bit_length()))
    for block in (most, most // 2, most // 4):  # one in which nothing is left over, if there is one
        fold = block // math.gcd(k, block)
        if block >= _LEAST_BLOCK and m % fold == 0:
            return fold, block
    step = VECTOR // math.gcd(k, VECTOR)
    folds = range(step, min(m, _MOST_FOLD) + 1, step)
    few = next((f for f in folds if _waste(f * k, most) <= _MOST_WASTE), None)
    return few or min(folds, key=lambda f: _waste(f * k, most)), most


def _waste(width: int, block: int) -> float:
    return -(-width // block) * block / width - 1


def reason_not(p: Problem) -> str | None:
    """Why the Triton kernels cannot serve a Problem, or None."""
    if (why := why_no_gpu(p, "triton")) is not None:
        return why
    if p.dtype == "float64":
        return "no kernel for float64"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0 or later"
    if p.dim("M") >= _MOST_ROWS or p.dim("K") >= _MOST_FEATURES:
        return f"serves fewer than {_MOST_ROWS} rows and {_MOST_FEATURES} features"
    return None
