"""Every way to launch diagonal_linear's kernels, and what their launches take time for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, product
from operator import mul
from typing import Any

from fastlinear.families.diagonal.triton.config import Cut, DiagonalConfig, cut, whole_cut

_UNITS = 132
_THREADS, _BLOCKS = 2048, 32  # of a multiprocessor
_L2_BYTES = 40_000_000
_PROGRAMS = 512  # for each multiprocessor: more have too little to do
_LONGEST = 256  # trips of a program where the chip is not full
_CLASSES = {"none": 0, "relu": 1, "leaky_relu": 1, "gelu": 3, "gelu_tanh": 3}
TERMS = (
    *("start", "sums", "first trips", "more trips", "100 KB", "100 KB out of memory"),
    *("10,000 numbers", "10,000 dear ones", "10,000 dearest", "10,000 one by one"),
    *("10,000 parameters", "10,000 sums", "thousand programs", "100 KB of parts"),
)
_US = {
    "forward": (1.5, 0.0, 0.7, 0.4, 1.0, 1.5, 0.05, 0.05, 0.1, 0.2, 0.1, 0.0, 0.2, 0.0),
    "backward": (1.5, 1.5, 0.9, 0.4, 1.0, 1.5, 0.05, 0.1, 0.2, 0.2, 0.1, 0.3, 0.2, 1.0),
}
"""Piece → microseconds of each of ``TERMS``: guesses, by which a sweep draws."""


@lru_cache
def _every(piece: str) -> tuple[DiagonalConfig, ...]:
    warps = (1, 2, 4, 8)
    every: tuple[Iterable[Any], ...]
    if piece == "forward":
        wide, numbers = (128, 256, 512, 1024, 2048, 4096), (512, 1024, 2048, 4096, 8192)
        alone = product(wide, numbers, warps, (1,), (0,), ("first", "last"))
        several = product(wide, numbers, warps, (1, 3), (2, 4, 8, 16), ("last",))
        every = alone, several
    else:
        wide, numbers = (32, 64, 128, 256, 512, 1024), (512, 1024, 2048, 4096, 8192)
        strips = product(wide, numbers, warps, (1, 3, 4, 5), (1, 2, 4, 8), ("first", "last"))
        whole = product((16, *wide), numbers, warps, (1, 2, 3), (0,), ("last",), (True,))
        every = strips, whole
    found = (DiagonalConfig(*c) for c in chain(*every))
    held = ((c, c.numbers // (32 * c.warps)) for c in found)
    most = 64 if piece == "forward" else 32
    return tuple(c for c, each in held if 4 <= each <= most and c.numbers >= c.block_k)


def cut_of(m: int, k: int, dense: bool, c: DiagonalConfig) -> Cut:
    """How a configuration cuts (M, K) numbers on a Hopper."""
    return whole_cut(m, k, c) if c.whole else cut(m, k, dense, _UNITS, c)


def candidates(piece: str, m: int, k: int) -> list[DiagonalConfig]:
    """Configurations that leave neither the chip nor a program idle.

    Args:
        piece: ``"forward"`` or ``"backward"``.
        m, k: x is (M, K), dense.
    """
    found = []
    for c in _every(piece):
        if c.block_k > max(128, 2 * k) and (m < 16 or c.whole):
            continue
        if m * k < c.numbers // 2 and c.numbers > 1024:
            continue
        made = cut_of(m, k, True, c)
        programs = made.strips * made.blocks
        if programs > _PROGRAMS * _UNITS and c.numbers < 4096:
            continue
        trips = -(-made.rows // (made.block_m * made.strips))
        if trips > _LONGEST and programs < _UNITS:
            continue
        if trips == 1 and c.stages > 1:
            continue
        found.append(c)
    return found


def microseconds(
    c: DiagonalConfig, piece: str, m: int, k: int, itemsize: int, activation: str
) -> float:
    """About how long the launches take on a Hopper."""
    return sum(map(mul, _US[piece], terms(c, piece, m, k, itemsize, activation)))


def terms(
    c: DiagonalConfig, piece: str, m: int, k: int, itemsize: int, activation: str
) -> tuple[float, ...]:
    """What the launches take time for, in the order of ``TERMS``; numbers are a multiprocessor's
    share.

    Args:
        c: the configuration.
        piece: ``"forward"`` or ``"backward"``.
        m, k: x is (M, K), dense.
        itemsize: bytes of a number.
        activation: its name.
    """
    made, back = cut_of(m, k, True, c), piece == "backward"
    kind = _CLASSES.get(activation, 2)
    programs = made.strips * made.blocks
    trips = -(-made.rows // (made.block_m * made.strips))
    at_once = _UNITS * min(_BLOCKS, _THREADS // (32 * c.warps))
    waves = -(-programs // at_once)
    tile = made.block_m * made.block_k
    share = max(programs / _UNITS, 1.0) * trips * tile
    moved = (3 if back else 2) * m * k * itemsize
    narrow = made.block_k * itemsize < 64 or made.width * itemsize % 16 != 0
    parts = made.strips * made.fold * k * 4 * 2 if back and not c.whole else 0
    return (
        1.0,
        float(back and not c.whole),
        float(waves),
        waves * (trips - 1) / min(c.stages, trips),
        moved / _UNITS / 1e5,
        max(0, moved - _L2_BYTES) / _UNITS / 1e5,
        share / 1e4,
        share * (kind >= 2) / 1e4,
        share * (kind >= 3) / 1e4,
        share * narrow / 1e4,
        programs * made.block_k / _UNITS / 1e4,
        programs * tile * back / _UNITS / 1e4,
        programs / 1e3,
        2 * parts / _UNITS / 1e5,
    )
