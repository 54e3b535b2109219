"""Launch configurations of diagonal_linear's backward, chosen by a model of their time.

The microseconds of the terms were fitted to launches of drawn configurations on drawn sizes, on an
H200 (``results/nvidia-h200/diagonal.jsonl.gz``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import mul

from fastlinear.families.diagonal.triton.config import Cut, DiagonalConfig, cut, whole_cut

_UNITS = 132
_REGISTERS, _THREADS, _BLOCKS = 65_536, 2048, 32  # of a multiprocessor
_PROGRAMS = 512  # for each multiprocessor: more have too little to do
_LONGEST = 256  # trips of a program where the chip is not full
_MOST_WHOLE = 1 << 21  # numbers: more take so long that a second launch is nothing beside them
_CLASSES = {"none": 0, "relu": 1, "leaky_relu": 1, "gelu": 4, "gelu_tanh": 4}  # others 3
BLOCKS = (
    DiagonalConfig(32, 512, 4, 1, 2, "last"),
    DiagonalConfig(32, 1024, 4, 1, 8, "first"),
    DiagonalConfig(32, 2048, 8, 1, 4, "first"),
    DiagonalConfig(32, 2048, 8, 5, 1, "last"),
    DiagonalConfig(32, 2048, 8, 5, 4, "first"),
    DiagonalConfig(64, 2048, 8, 5, 2, "first"),
    DiagonalConfig(16, 1024, 4, 1, 0, "last", whole=True),
    DiagonalConfig(16, 1024, 8, 1, 0, "last", whole=True),
    DiagonalConfig(16, 2048, 8, 3, 0, "last", whole=True),
    *(DiagonalConfig(16, 4096, 8, stages, 0, "last", whole=True) for stages in (1, 3)),
    DiagonalConfig(32, 2048, 8, 3, 0, "last", whole=True),
)
"""What calls choose from: others gained 1% together on 200 drawn calls."""
TERMS = (
    *("sum of strips", "programs", "more trips by stages of loads", "100 derivatives of a thread"),
    *("100 KB of memory", "10,000 numbers", "10,000 dear ones", "10,000 one by one"),
    *("100 KB of strips' sums", "10,000 of folded rows"),
)
_US = {
    2: (1.151, 1.523, 0.4223, 0.5744, 0.9461, 1.137, 0.3939, 0.4877, 19.88, 2.251),
    4: (1.005, 1.312, 0.3501, 0.8525, 1.378, 1.802, 0.9088, 1.757, 10.09, 0.8492),
}
"""Bytes of a number → microseconds of each of ``TERMS``."""


@lru_cache(maxsize=1024)
def config_for(m: int, k: int, itemsize: int, activation: str) -> DiagonalConfig:
    """The configuration that should take least for M rows of K features of ``itemsize`` bytes."""
    call = m, k, itemsize, activation
    return min(candidates(m, k), key=lambda c: microseconds(c, *call))


def candidates(
    m: int, k: int, blocks: Sequence[DiagonalConfig] = BLOCKS
) -> Iterator[DiagonalConfig]:
    """Those of ``blocks`` that leave neither the chip nor a program idle; of none, the first.

    Args:
        m, k: x is (M, K), dense.
    """
    found = False
    for c in blocks:
        if (c.block_k > max(128, 2 * k) and (m < 16 or c.whole)) or m * k < c.numbers // 2 > 512:
            continue
        if c.whole and m * k > _MOST_WHOLE:
            continue
        made = cut_of(m, k, c)
        programs, trips = made.strips * made.blocks, _trips(made)
        idle = programs > _PROGRAMS * _UNITS and c.numbers < 4096
        if idle or (trips > _LONGEST and programs < _UNITS) or (trips == 1 and c.stages > 1):
            continue
        found = True
        yield c
    if not found:
        yield blocks[0]


def cut_of(m: int, k: int, c: DiagonalConfig, dense: bool = True, units: int = _UNITS) -> Cut:
    """How a configuration cuts (M, K) numbers."""
    return whole_cut(m, k, c) if c.whole else cut(m, k, dense, units, c)


def microseconds(c: DiagonalConfig, m: int, k: int, itemsize: int, activation: str) -> float:
    """About how long the launches take on a Hopper."""
    return sum(map(mul, _US[itemsize], terms(c, m, k, itemsize, activation)))


def terms(c: DiagonalConfig, m: int, k: int, itemsize: int, activation: str) -> tuple[float, ...]:
    """What the launches take time for, in the order of ``TERMS``; numbers are a multiprocessor's
    share.

    Args:
        c: the configuration.
        m, k: x is (M, K), dense.
        itemsize: bytes of a number.
        activation: its name.
    """
    made, threads, cost = cut_of(m, k, c), 32 * c.warps, _CLASSES.get(activation, 3)
    programs, trips, tile = made.strips * made.blocks, _trips(made), made.block_m * made.block_k
    each = tile / threads
    registers = min(255, 32 + 4 * each)
    fit = _BLOCKS, _THREADS // threads, max(1, int(_REGISTERS // (registers * threads)))
    rounds = 1 + programs / (_UNITS * min(fit))
    share = max(programs / _UNITS, 1.0) * trips * tile / 1e4
    narrow = made.block_k * itemsize < 64 or made.width * itemsize % 16 != 0
    return (
        *(float(not c.whole), rounds, rounds * (trips - 1) / min(c.stages, trips)),
        rounds * trips * each * cost / 100,
        3 * m * k * itemsize / _UNITS / 1e5,
        *(share, share * (cost == 3), share * narrow),
        made.strips * made.fold * k * 16 * (not c.whole) / _UNITS / 1e5,
        share * (made.fold > 1),
    )


def _trips(made: Cut) -> int:
    """Of a program, through its rows."""
    return -(-made.rows // (made.block_m * made.strips))
