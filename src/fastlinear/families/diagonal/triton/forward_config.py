"""A model of what diagonal_linear's forward takes in Triton, by its launch configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import mul

from fastlinear.families.diagonal.triton.config import DiagonalConfig, cut

_UNITS = 132
_REGISTERS, _THREADS, _BLOCKS = 65_536, 2048, 32  # of a multiprocessor
_PROGRAMS = 1024  # for each multiprocessor: more have too little to do
_LONGEST = 256  # trips of a program where the chip is not full
_CLASSES = {"none": 0, "relu": 1, "leaky_relu": 1, "gelu": 4, "gelu_tanh": 4}  # others 3
TERMS = (
    *("a launch", "programs", "more trips by stages of loads", "100 activations of a thread"),
    *("100 KB of memory", "10,000 numbers", "10,000 dear ones", "10,000 one by one"),
    *("100 KB of parameters", "10,000 of folded rows"),
)
_US = {
    2: (0.8, 0.1, 0.2, 0.3, 3.1, 0.2, 0.3, 0.5, 0.3, 0.5),
    4: (0.8, 0.1, 0.2, 0.3, 3.1, 0.2, 0.3, 0.5, 0.3, 0.5),
}
"""Bytes of a number → microseconds of each of ``TERMS``."""


def candidates(m: int, k: int, blocks: Sequence[DiagonalConfig]) -> Iterator[DiagonalConfig]:
    """Those of ``blocks`` that leave neither the chip nor a program idle; of none, the first.

    Args:
        m, k: x is (M, K), dense.
        blocks: what to choose from.
    """
    found = False
    for c in blocks:
        if (c.block_k > max(128, 2 * k) and m < 16) or m * k < c.numbers // 2 > 512:
            continue
        made = cut(m, k, True, _UNITS, c)
        programs, tiles = made.strips * made.blocks, -(-made.rows // made.block_m)
        trips = -(-tiles // made.strips)
        idle = programs > _PROGRAMS * _UNITS and c.numbers < 4096
        if idle or (trips > _LONGEST and programs < _UNITS) or (c.per_unit > 0 and trips == 1):
            continue
        found = True
        yield c
    if not found:
        yield blocks[0]


def microseconds(c: DiagonalConfig, m: int, k: int, itemsize: int, activation: str) -> float:
    """About how long the launch takes on a Hopper."""
    return sum(map(mul, _US[itemsize], terms(c, m, k, itemsize, activation)))


def terms(c: DiagonalConfig, m: int, k: int, itemsize: int, activation: str) -> tuple[float, ...]:
    """What the launch takes time for, in the order of ``TERMS``; numbers are a multiprocessor's
    share.

    Args:
        c: the configuration.
        m, k: x is (M, K), dense.
        itemsize: bytes of a number.
        activation: its name.
    """
    made, threads, cost = cut(m, k, True, _UNITS, c), 32 * c.warps, _CLASSES.get(activation, 3)
    programs, tile = made.strips * made.blocks, made.block_m * made.block_k
    trips = -(-made.rows // (made.block_m * made.strips))
    each = tile / threads
    registers = min(255, 24 + each * (1 + 2 / made.block_m))
    fit = _BLOCKS, _THREADS // threads, max(1, int(_REGISTERS // (registers * threads)))
    rounds = 1 + programs / (_UNITS * min(fit))
    share = max(programs / _UNITS, 1.0) * trips * tile / 1e4
    narrow = made.block_k * itemsize < 64 or made.width * itemsize % 16 != 0
    return (
        *(1.0, rounds, rounds * (trips - 1) / min(c.stages, trips)),
        rounds * trips * each * cost / 100,
        2 * m * k * itemsize / _UNITS / 1e5,
        *(share, share * (cost > 1), share * narrow),
        2 * max(programs / _UNITS, 1.0) * made.block_k * itemsize / 1e5,
        share * (made.fold > 1),
    )
