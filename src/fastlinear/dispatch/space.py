"""The space of a family's Problems, from which tests draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem


@dataclass(frozen=True)
class Space:
    """Small calls of a family: their sizes and their options.

    Attributes:
        problem: (piece, *sizes, options and facts by name) → the Problem.
        sizes: ones, and sizes on either side of a kernel's tile.
        options: keyword of ``problem`` → its values; one written twice comes twice as often.
        narrowed: piece → fewer values of some options, or values of its own.
        times: how often the size, or the value of the option, comes that has most alternatives.
        times_on_cuda: the same on a GPU, where kernels are compiled for each; ``times`` if None.
    """

    problem: Callable[..., Problem]
    sizes: Sequence[tuple[Any, ...]]
    options: Mapping[str, Sequence[Any]]
    narrowed: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    times: int = 5
    times_on_cuda: int | None = None

    def draw(self, piece: str, dtype: str, device: str, seed: int = 0) -> Iterator[Problem]:
        """Problems of a piece; the same ones for the same seed."""
        columns = {"needs_grad": (False,), **self.options, **self.narrowed.get(piece, {})}
        if piece != "forward":
            columns["needs_grad"] = (True,)
        columns["sizes"] = self.sizes
        times = self.times_on_cuda if device == "cuda" else None
        count = (times or self.times) * max(map(len, columns.values()))
        precision = matmul_precision(FLOAT_DTYPES[dtype])
        for row in islice(_pairwise(columns, Random(f"{piece} {seed}")), count):
            facts = {"dtype": dtype, "device": device, "precision": precision}
            yield self.problem(piece, *row.pop("sizes"), **facts, **row)


def _pairwise(columns: Mapping[str, Sequence[Any]], rng: Random) -> Iterator[dict[str, Any]]:
    """Rows of one value a column, so that any two values of two columns soon meet.

    Each column, the longest first, gives the value with most pairs that have not met yet.
    """
    met: set[Any] = set()
    used: Counter[Any] = Counter()
    while True:
        row: list[tuple[str, int]] = []
        for name in sorted(columns, key=lambda name: -len(columns[name])):
            ranked = [
                (sum((entry, other) in met for other in row), used[entry], rng.random(), entry)
                for entry in ((name, i) for i in range(len(columns[name])))
            ]
            row.append(min(ranked)[-1])
        met.update((b, a) for i, b in enumerate(row) for a in row[:i])
        used.update(row)
        yield {name: columns[name][i] for name, i in row}
