"""The four kernels of mlp's ``whole_cuda``: forwards of few rows in inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any

import torch

from benchmarks.experiments.configurations.kind import (
    Kind,
    Problem,
    dtype_of,
    log_uniform,
    normal,
    turns,
    width,
)
from benchmarks.experiments.configurations.rows import told
from fastlinear.families.mlp.cuda import backend, choice
from fastlinear.families.mlp.cuda.choice import Sharing
from fastlinear.families.mlp.cuda.clusters import MAX_LAYERS
from fastlinear.families.mlp.cuda.config import (
    CLUSTERS,
    Config,
    Widths,
)
from fastlinear.families.mlp.cuda.grid import Grid
from fastlinear.families.mlp.cuda.launches import Launches
from fastlinear.families.mlp.cuda.stream import Stream

_MOST_ROWS, _MOST_WIDTH = 1024, 4096
_MOST_NUMBERS, _MOST_PRODUCTS = 1.5e8, 1e10
_ACTIVATIONS = ("relu", "relu", "silu", "gelu", "tanh", "none")
_KERNELS = {"clusters": Config, "grid": Grid, "stream": Stream, "launches": Launches}
_DRAWN, _BEST, _OTHERS = 600, 4, 7  # of each kernel: looked at, and listed


@dataclass(frozen=True)
class Shared:
    """A configuration as rows have it: for one launch, or one for each layer.

    Attributes:
        kernel: name of the kernel.
        configs: of its launches.
    """

    kernel: str
    configs: tuple[Config | Grid | Stream | Launches, ...]

    @property
    def sharing(self) -> Sharing:
        """As calls take it."""
        return self.configs if self.kernel == "launches" else self.configs[0]  # type: ignore


def _shared(sharing: Sharing) -> Shared:
    configs = sharing if isinstance(sharing, tuple) else (sharing,)
    return Shared(choice.kernel(sharing), configs)


def _draw(draw: Random) -> Problem | None:
    layers, kind = draw.choice((2, 2, 3, 3, 4, 4, 5, 6, 8, 8, 12, 16)), draw.random()
    hidden = _width(draw)
    if kind < 0.5:
        widths = [hidden] * (layers + 1)
    elif kind < 0.8:
        ends = _width(draw), draw.choice((1, 10, 17, hidden, _width(draw)))
        widths = [ends[0], *[hidden] * (layers - 1), ends[1]]
    else:
        widths = [_width(draw) for _ in range(layers + 1)]
    rows, numbers = log_uniform(draw, _MOST_ROWS), sum(k * n for k, n in pairwise(widths))
    if numbers > _MOST_NUMBERS or rows * numbers > _MOST_PRODUCTS:
        return None
    problem = {
        "M": rows,
        "K": widths[0],
        "widths": "-".join(map(str, widths)),
        "dtype": draw.choice(("bfloat16", "bfloat16", "float32")),
        "activation": draw.choice(_ACTIVATIONS),
    }
    able = choice.sharings(*_sizes(problem), _aligned(problem))
    return problem if able and len(_candidates(problem)) > 1 else None


def _width(draw: Random) -> int:
    """One that users have, or a multiple that clusters and grids share out evenly."""
    if draw.random() < 0.5:
        return min(width(draw), _MOST_WIDTH)
    return draw.choice((32, 128)) * draw.randint(1, 16)


def _sizes(p: Problem) -> tuple[Widths, int, int]:
    return tuple(map(int, p["widths"].split("-"))), p["M"], dtype_of(p).itemsize


def _aligned(p: Problem) -> bool:
    """Whether every row of every weight starts on 16 bytes."""
    widths, _, itemsize = _sizes(p)
    return all(k * itemsize % 16 == 0 for k in widths[:-1])


def _chosen(p: Problem) -> Shared:
    return _shared(choice.sharings(*_sizes(p), _aligned(p))[0])


def _us(p: Problem, c: Shared) -> float:
    return choice.microseconds(c.sharing, *_sizes(p))


@lru_cache(maxsize=64)
def _listed(problem: tuple[tuple[str, Any], ...]) -> tuple[Shared, ...]:
    p: Problem = dict(problem)
    found: list[Shared] = []
    for drawn in (_clusters, _grids, _streams, _launches):
        draw = Random(told(p))
        every = [_shared(c) for c in dict.fromkeys(drawn(p, draw))]
        every.sort(key=lambda c: _us(p, c))
        rest = every[_BEST : max(_BEST + _OTHERS, len(every) // 2)]
        found += [*every[:_BEST], *draw.sample(rest, min(_OTHERS, len(rest)))]
    return tuple(found)


def _candidates(p: Problem) -> list[Shared]:
    """Of each kernel the best of many drawn configurations by the model, and some others."""
    return list(_listed(tuple(p.items())))


def _clusters(p: Problem, draw: Random) -> Iterator[Sharing]:
    widths, rows, itemsize = _sizes(p)
    aligned, tiles = _aligned(p), max(widths[1:]) / 16
    if len(widths) - 1 > MAX_LAYERS:
        return
    for _ in range(_DRAWN):
        direct = aligned and len(set(widths)) == 1 and draw.random() < 0.4
        config = Config(
            cluster=draw.choice((1, 2, 4, 8, 16)),
            rows=min(draw.choice((8, 16, 24, 32, 48, 64)), -(-rows // 8) * 8),
            groups=draw.choice((1, 2, 4, 8)),
            split_k=draw.choice((1, 2, 4, 8)),
            tiles=draw.choice((1, 1, 2, 4)),
            unroll=1 if direct else draw.choice((1, 2, 4)),
            depth=draw.choice((2, 3, 4, 6, 8, 10, 12, 16)),
            simt=itemsize == 4 and draw.random() < 0.7,
            direct=direct,
        )
        width = config.groups * config.tiles
        spills = choice.registers(config) > min(255, 65536 // (32 * config.warps))
        idle = width > 1 and config.cluster * width / 2 >= tiles
        if not (spills or idle or config.warps < 4) and config.invalid(widths, itemsize) is None:
            yield config


def _grids(p: Problem, draw: Random) -> Iterator[Sharing]:
    widths, rows, itemsize = _sizes(p)
    if not _aligned(p) or len(set(widths)) > 1:
        return
    for cluster in (2, 4, 8):
        least = -(-(widths[0] // 8) // CLUSTERS[cluster])
        for tiles in {least, least + 1, 2 * least}:
            for slots in range(2, min(len(widths) - 1, 16) + 1):
                for groups in (1, 2) if itemsize == 2 else (1,):
                    grid = Grid(cluster, tiles, slots, groups)
                    if grid.invalid(widths, rows, itemsize) is None:
                        yield grid


def _streams(p: Problem, draw: Random) -> Iterator[Sharing]:
    widths, rows, itemsize = _sizes(p)
    if not _aligned(p) or itemsize != 2:
        return
    for _ in range(_DRAWN):
        cluster = draw.choice((2, 4, 8))
        most = CLUSTERS[cluster]
        clusters = draw.choice((most, most, round(most * draw.uniform(0.3, 1.0))))
        stages = draw.choice((4, 6, 8, 10, 12, 16))
        one = Stream(cluster, clusters, stages, 1)
        held = -(-one.slice_tiles(widths, rows) // draw.choice((1, 1, 2, 3, 4)))
        stream = Stream(cluster, clusters, stages, held, draw.choice((1, held)))
        if stream.invalid(widths, rows) is None:
            yield stream


def _launches(p: Problem, draw: Random) -> Iterator[Sharing]:
    widths, rows, itemsize = _sizes(p)
    layers = len(widths) - 1
    if not _aligned(p) or layers > MAX_LAYERS:
        return
    every = []
    for _ in range(_DRAWN):
        config = Launches(
            cluster=draw.choice((1, 2, 4, 8)),
            tiles=draw.choice((1, 1, 2, 3)),
            columns=draw.choice((1, 2, 3, 4, 6, 8)),
            k_groups=draw.choice((1, 1, 2, 4)),
            stages=draw.choice((2, 3, 4, 5, 6, 8, 12, 16)),
            x_blocks=draw.choice((4, 8, 16, 32)),
            per_unit=draw.choice((1, 2, 2, 3, 4)),
        )
        threads = 32 * config.warps * config.per_unit
        spills = choice.layer_registers(config, rows, itemsize) * threads > 1.15 * 65536
        if config.warps >= 2 and not spills and config.invalid(rows, itemsize) is None:
            every.append(config)
            yield (config,) * layers

    @lru_cache
    def best(k: int, n: int) -> Launches:
        return min(every, key=lambda c: choice.microseconds((c,), (k, n), rows, itemsize))

    if every and layers <= 8:
        yield tuple(best(k, n) for k, n in pairwise(widths))


def _inputs(p: Problem, place: torch.device) -> list[tuple[Any, ...]]:
    widths, dtype = _sizes(p)[0], dtype_of(p)

    def made() -> tuple[Any, ...]:
        weights = tuple(normal(place, dtype, n, k) / k**0.5 for k, n in pairwise(widths))
        biases = tuple(normal(place, dtype, n) for n in widths[1:])
        return normal(place, dtype, p["M"], widths[0]), weights, biases

    numbers = sum(k * n for k, n in pairwise(widths))
    return [made() for _ in range(max(2, turns(numbers, dtype)))]


def _run(p: Problem, c: Shared) -> Callable[..., Any]:
    def run(x: Any, weights: Any, biases: Any) -> Any:
        call = x, weights, biases, p["activation"], "none", False
        return backend.forward(*call, config=c.sharing)

    return run


def _terms(p: Problem, c: Shared) -> tuple[float, ...]:
    """Those of its kernel, beside zeros for the others'."""
    own = choice.terms(c.sharing, *_sizes(p))
    found: list[float] = []
    for kernel, weights in choice._US.items():
        found += own if kernel == c.kernel else [0.0] * len(weights[2])
    return tuple(found)


def _config(p: Problem, fields: dict[str, Any]) -> Shared:
    made = _KERNELS[fields["kernel"]]
    return Shared(fields["kernel"], tuple(made(**c) for c in fields["configs"]))


def _serves(p: Problem, c: Shared) -> bool:
    """Not of clusters of 2 in 16 bits, which hold too much of K in registers."""
    (config, *_) = c.configs
    return not isinstance(config, Grid) or config.cluster > 2 or p["dtype"] == "float32"


KIND = Kind(
    draw=_draw,
    chosen=_chosen,
    candidates=_candidates,
    microseconds=_us,
    inputs=_inputs,
    run=_run,
    terms=_terms,
    config=_config,
    group=lambda p: "float32" if p["dtype"] == "float32" else "16 bits",
    serves=_serves,
)
