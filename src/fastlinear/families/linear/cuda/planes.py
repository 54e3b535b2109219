"""Products of float32 by three products of float16 on Hopper: kernels and how they are shared out.

``planes_split.cu`` makes two planes of float16 of each operand, ``planes.cu`` multiplies them.
Touches no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from math import ceil
from pathlib import Path

import torch

from fastlinear.activations.reference import CUDA_HEADER, cuda_macros
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_hopper
from fastlinear.kernels.cuda.hopper import (
    ASYNC,
    BK,
    RAGGED_HEADER,
    SHARED_LIMIT,
    WORDS,
    wgmma_source,
)

KERNEL, SUMS_KERNEL = "planes_product", "planes_sums"
SPLIT_KERNEL, BIAS_KERNEL = "planes_split", "planes_bias"
SPLIT_THREADS = 256
CAPABILITY = (9, 0)
SEGMENT = 64
PITCH = 8
"""Rows of planes begin at multiples of so many numbers."""
AT_ONCE = 1 << 27
"""Numbers of a first operand, whose planes take 1 GiB one way; larger ones are split in parts."""
_LINES = 128  # of a part a multiple
_MOST_SLICES = 64
_MOST = 1 << 30  # of each size: coordinates of tiles are 32-bit
MOST_NUMBERS, MOST_OF_GROUPS = 1 << 29, 1 << 28  # of each operand: planes are copies
_HERE = Path(__file__).parent
_PARTS = tuple(f"planes_{part}.h" for part in ("params", "loads", "steps", "read", "results"))


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve the Problem, or None."""
    if (why := why_no_hopper(p) or reason_not_exact(p)) is not None:
        return why
    return why_not_of(p.dim("M"), p.dim("K"), p.dim("N"))


def reason_not_exact(p: Problem) -> str | None:
    """Why a Problem is not one of float32 of full precision, or None."""
    exact = p.dtype == "float32" and p.precision == "highest"
    return None if exact else "for float32 of full precision only"


def why_not_of(m: int, k: int, n: int, groups: int = 1) -> str | None:
    """Why products of x (m, k) and a weight (n, k), of each group, are not of planes, or None."""
    if min(m, k, n) < 1:
        return "an empty dimension"
    if max(m, k, n) >= _MOST:
        return "sizes must stay below 2^30"
    each = ((m, k), (k, m), (n, k), (k, n), (m, n), (n, m))
    if groups > 1:
        if max(groups * up(rows, SEGMENT) * pitch(row) for rows, row in each) > MOST_OF_GROUPS:
            return "planes of all groups may have 2^28 elements, 64 rows at a time"
    elif max(rows * pitch(row) for rows, row in each) > MOST_NUMBERS:
        return "x, weight and y may have 2^29 elements each, rows of eight: planes are copies"
    return None


def parts(lines: int, width: int, at_once: int) -> list[slice]:
    """Lines of so many numbers each, of a matrix whose planes are made in parts where it holds more
    numbers than ``at_once``."""
    each = lines
    if lines * width > at_once:
        each = max(1, at_once // (width * _LINES)) * _LINES
    return [slice(i, min(i + each, lines)) for i in range(0, lines, each)]


def up(size: int, step: int) -> int:
    """The next multiple of the step."""
    return -(-size // step) * step


def pitch(row: int) -> int:
    """Numbers between rows of planes."""
    return up(row, PITCH)


class Derivation(IntEnum):
    """How a matrix that is split is derived from tensors of its shape."""

    NONE = 0
    """It is the first."""
    GRADIENT = 1
    """dy act'(saved), with what the activation saves."""
    GATED = 2
    """x act(pre)."""
    GATE_GRADIENT = 3
    """dh up act'(pre)."""


class Raggedness(IntEnum):
    """What the sizes of groups, which only the device knows, are of in a product."""

    NONE = 0
    ROWS = 1
    """Rows of the first operand and of the result."""
    K = 2


@dataclass(frozen=True)
class Config:
    """How a product is shared out.

    Attributes:
        bn: columns of a tile of 128 rows.
        stages: of the pipeline, each 64 steps along K.
        group_m: row tiles visited before moving to the next column.
        slices: that K is shared out in.
        reads: whether the first operand comes as numbers, which are split where they lie in shared
            memory.
    """

    bn: int = 128
    stages: int = 3
    group_m: int = 8
    slices: int = 1
    reads: bool = False

    @property
    def threads(self) -> int:
        """Of a block: a producer warpgroup, two consumers, and two that split what is read."""
        return 640 if self.reads else 384

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        planes, scales = 2 * (128 + self.bn) * BK * 2, 2 * ((128 + self.bn) * 4 + 48)
        return self.stages * (planes + scales + 4 * 8) + 16 * 8

    def invalid(self, k: int) -> str | None:
        """Why this configuration cannot serve products of that depth, or None."""
        if self.bn not in STAGES:
            return f"{self.bn} columns"
        if self.stages < 2 or self.shared_bytes > SHARED_LIMIT:
            return f"{self.shared_bytes} bytes of shared memory with {self.stages} stages"
        if (self.slices - 1) * slice_tiles(k, self.slices) >= ceil(k / BK):
            return f"{self.slices} slices of K={k}, of which the last is empty"
        return None

    def terms(self, m: int, n: int, k: int, units: int, groups: int = 1) -> tuple[float, ...]:
        """What a launch's time is a weighted sum of: for each width of tiles its products and its
        tiles, in turn; then one, what slices write and read again, and whether there are any."""
        rounds = ceil(groups * ceil(m / 128) * ceil(n / self.bn) * self.slices / units)
        steps = rounds * slice_tiles(k, self.slices)
        by_width = [v * (bn == self.bn) for bn in STAGES for v in (steps, rounds)]
        apart = self.slices > 1
        return (*by_width, 1.0, apart * self.slices * groups * m * n / 1e6, float(apart))

    def microseconds(self, m: int, n: int, k: int, units: int, groups: int = 1) -> float:
        """How long a launch takes, by a model."""
        terms = self.terms(m, n, k, units, groups)
        return sum(us * t for us, t in zip(_US[self.reads], terms, strict=True))


def source(
    config: Config,
    activation: str = "none",
    *,
    has_bias: bool = False,
    save_pre: bool = False,
    added: bool = False,
    grouped: bool = False,
    ragged: Raggedness = Raggedness.NONE,
    turned: tuple[bool, bool] = (False, False),
    derivations: tuple[Derivation, Derivation] = (Derivation.NONE, Derivation.NONE),
) -> str:
    """The complete CUDA C++ source of one specialisation of ``planes.cu``."""
    macros = {
        "BM": 128,
        "BN": config.bn,
        "STAGES": config.stages,
        "GROUP_M": config.group_m,
        "READS": int(config.reads),
        "GROUPED": int(grouped),
        "RAGGED": int(ragged),
        "A_MN": int(turned[0]),
        "B_MN": int(turned[1]),
        "A_DERIVED": int(derivations[0]),
        "B_DERIVED": int(derivations[1]),
        "SAVE": int(save_pre),
        "HAS_BIAS": int(has_bias),
        "ADDED": int(added),
        **_macros(activation),
    }
    instructions = wgmma_source(config.bn, torch.float16, *turned)
    return _text(macros, instructions, *_PARTS, "planes.cu")


@cache
def split_source(activation: str = "none", grouped: bool = False, ragged: bool = False) -> str:
    """The complete CUDA C++ source of ``planes_split.cu``, with the activation of what is
    derived."""
    macros = {"GROUPED": int(grouped), "RAGGED": int(ragged), **_macros(activation)}
    return _text(macros, "", "planes_split.cu")


def _macros(activation: str) -> dict[str, str | int]:
    derivations = {f"DERIVED_{one.name}": int(one) for one in Derivation}
    return {"IS_BF16": 0, **derivations, **cuda_macros("tail", activation)}


def _text(macros: dict[str, str | int], instructions: str, *names: str) -> str:
    defines = "".join(f"#define {k} {v}\n" for k, v in macros.items())
    own = (_HERE / name for name in ("planes.h", *names))
    files = WORDS, CUDA_HEADER, ASYNC, RAGGED_HEADER, *own
    return defines + instructions + "".join(p.read_text() for p in files)


STAGES = {64: 4, 128: 3}
"""Of each width of tiles, as many as shared memory holds."""
# Microseconds of each of ``terms``, of plain products and where numbers are read: fitted to 3,298
# launches of drawn products on an H200 (``results/nvidia-h200/planes.jsonl.gz``).
_US = (
    (0.7745, 1.65, 1.14, 2.288, 0.9683, 2.043, 1.505),
    (1.706, 0.7875, 1.998, 1.756, 2.394, 2.522, 1.32),
)
START_US = _US[0][4]
"""Of it what any launch takes."""
# Of a million numbers that are split beforehand: 65,536 rows of 256 take 36.2 us, of which any
# launch takes 2.4 (``planes-layers.jsonl``).
_SPLIT_US = 2.0
_LATE = 1.07
"""How much longer calls take than by this model where numbers are read, beside others: medians of
layers that were timed both ways (``planes-layers.jsonl``)."""


def slice_tiles(k: int, slices: int) -> int:
    """k-tiles of a slice."""
    return ceil(ceil(k / BK) / slices)


def candidates(m: int, n: int, k: int, reads: bool = False) -> Iterator[Config]:
    """All that a call chooses from; m, n, k: of the product, the rest as Config's."""
    k_tiles = ceil(k / BK)
    counts = {ceil(k_tiles / ceil(k_tiles / s)) for s in range(1, min(k_tiles, _MOST_SLICES) + 1)}
    for bn, stages in STAGES.items():
        one = Config(bn, stages, reads=reads)
        while one.shared_bytes > SHARED_LIMIT:
            one = replace(one, stages=one.stages - 1)
        for slices in sorted(counts):
            yield replace(one, slices=slices)


@cache
def config_for(
    m: int,
    n: int,
    k: int,
    units: int,
    reads: bool = False,
    groups: int = 1,
    whole: bool = False,
) -> Config:
    """The configuration that is predicted to take the least time; ``whole``: without slices."""
    found = (c for c in candidates(m, n, k, reads) if c.slices == 1 or not whole)
    return min(found, key=lambda c: c.microseconds(m, n, k, units, groups))


def ragged_config(
    m: int, n: int, k: int, units: int, groups: int, raggedness: Raggedness
) -> Config:
    """That of groups of the mean size, of ragged rows m or ragged K, where they are that."""
    each = max(1, min(groups, m if raggedness is Raggedness.ROWS else k))
    if raggedness is Raggedness.ROWS:
        return config_for(ceil(m / each), n, k, units, groups=each, whole=True)
    return config_for(m, n, ceil(k / each), units, groups=groups)


@cache
def split_late(m: int, n: int, k: int, units: int) -> bool:
    """Whether a first operand that can be read is split where it is multiplied: where that is
    predicted to take less than a split beforehand and a product."""
    late = config_for(m, n, k, units, reads=True).microseconds(m, n, k, units)
    split = config_for(m, n, k, units).microseconds(m, n, k, units)
    return _LATE * late < split + _SPLIT_US * m * k / 1e6
