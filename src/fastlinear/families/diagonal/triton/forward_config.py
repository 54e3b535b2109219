"""Launch configurations of diagonal_linear's forward, chosen by a model of their time.

The microseconds of the terms were fitted to launches of drawn configurations on drawn sizes, on an
H200 (``results/nvidia-h200/diagonal-forward.jsonl.gz``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import log2
from operator import mul

from fastlinear.families.diagonal.triton.config import DiagonalConfig, cut

_UNITS = 132
_REGISTERS, _THREADS, _BLOCKS = 65_536, 2048, 32  # of a multiprocessor
_CLASSES = {"none": 0, "relu": 1, "leaky_relu": 1, "gelu": 4, "gelu_tanh": 4}  # others 3
_LARGE = 1 << 22  # numbers of several waves: programs of a sweep that wait would take their place
BLOCKS = (
    DiagonalConfig(128, 512, 8, 1, 0),
    DiagonalConfig(128, 1024, 8, 1, 0),
    DiagonalConfig(256, 256, 1, 1, 0),
    DiagonalConfig(512, 512, 8, 1, 0),
    *(DiagonalConfig(1024, numbers, 4, 1, 0) for numbers in (1024, 2048, 4096)),
)
"""What calls choose from: others gained 1% together by a regression of the same rows."""
TERMS = (
    *("start", "100 KB of memory", "10 programs of a multiprocessor", "log of a thread's numbers"),
    *("log of a program's columns", "several rows, parts of them or joined ones"),
    *("10 activations of a thread", "100 KB by logs of many numbers of a thread"),
    "100 KB by logs of few columns of a thread",
)
_US = {
    2: (0.3912, 2.873, 0.7766, 0.03102, 0.07729, 0.2825, 0.07693, 0.0, 1.358),
    4: (0.2622, 2.346, 0.499, 0.03144, 0.09236, 0.2721, 0.1233, 0.1681, 0.6745),
}
"""Bytes of a number → microseconds of each of ``TERMS``."""


@lru_cache(maxsize=1024)
def config_for(m: int, k: int, itemsize: int, activation: str) -> DiagonalConfig:
    """The configuration that should take least for M rows of K features of ``itemsize`` bytes."""
    found = min(BLOCKS, key=lambda c: microseconds(c, m, k, itemsize, activation))
    return found if m * k < _LARGE else replace(found, early="last")


def microseconds(c: DiagonalConfig, m: int, k: int, itemsize: int, activation: str) -> float:
    """About how long the launch takes on a Hopper."""
    return sum(map(mul, _US[itemsize], terms(c, m, k, itemsize, activation)))


def terms(c: DiagonalConfig, m: int, k: int, itemsize: int, activation: str) -> tuple[float, ...]:
    """What the launch takes time for, in the order of ``TERMS``.

    Args:
        c: the configuration.
        m, k: x is (M, K), dense.
        itemsize: bytes of a number.
        activation: its name.
    """
    made, threads = cut(m, k, True, _UNITS, c), 32 * c.warps
    programs, rows = made.strips * made.blocks, made.block_m
    trips = -(-made.rows // (rows * made.strips))
    each = max(1.0, rows * made.block_k / threads)
    columns = max(min(16 / itemsize, each), made.block_k / threads)
    registers = min(255, 24 + each * (1 + 2 / rows))
    fit = min(_BLOCKS, _THREADS // threads, max(1, int(_REGISTERS // (registers * threads))))
    waves = max(1.0, programs / (_UNITS * fit))
    memory = 2 * m * k * itemsize / _UNITS / 1e5
    return (
        *(1.0, memory, -(-programs // _UNITS) * trips / 10, log2(each), log2(made.block_k)),
        float(rows > 1 or made.fold > 1 or not made.even),
        waves * trips * each * _CLASSES.get(activation, 3) / 10,
        memory * max(0.0, log2(each / 16)),
        memory * max(0.0, log2(8 / columns)),
    )
