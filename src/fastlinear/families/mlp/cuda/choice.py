"""Which configuration a call of ``whole_cuda`` takes: predicted times of all four kernels.

A time is a weighted sum of a few terms: bytes, steps of a pipeline, products, exchanges, launches.
The weights are fitted to launches on an H200. Pure arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice, pairwise, product
from math import gcd
from operator import mul
from typing import NamedTuple

from fastlinear.families.mlp.cuda.clusters import MAX_LAYERS
from fastlinear.families.mlp.cuda.config import CLUSTERS, Config, Widths, column_tiles
from fastlinear.families.mlp.cuda.grid import Grid
from fastlinear.families.mlp.cuda.launches import MAX_BLOCK_ROWS, Launches
from fastlinear.families.mlp.cuda.stream import Stream, k_groups
from fastlinear.families.mlp.cuda.stream import column_tiles as stream_tiles

Sharing = Config | Grid | Stream | tuple[Launches, ...]
"""How a chain is shared out: one launch, or one a layer."""

_SHARED_OF_A_UNIT, _SHARED_OF_A_BLOCK = 233_472, 1024  # what one has, and takes besides
_REGISTERS, _OTHER_REGISTERS = 65_536, 48
_L2_BYTES = 40e6  # what it keeps of weights
_MIB = 1 << 20
_TURNS, _TURN_BYTES = 24, 120e6  # most weights that are read in turn, and their size

# Warps of a block, along columns and along K: of ``whole.cu``, of ``launches.cu``.
_WARPS = ((1, 4), (1, 8), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2))
_LAYER_WARPS = ((2, 1), (4, 1), (6, 1), (8, 1), (2, 2), (4, 2), (1, 4), (4, 4))
_GRIDS = {2: ((4, 2), (8, 2), (4, 1), (8, 1)), 4: ((8, 1), (4, 1), (2, 1))}
"""Size of a number → blocks of a cluster, groups along K."""
_MOST_HELD = 4  # tiles of K: more gain nothing

# Microseconds of each kernel's terms: 16-bit numbers, float32.
_US: dict[str, dict[int, tuple[float, ...]]] = {
    "clusters": {
        2: (
            *(1.81, 0.1608, 0.1409, 0.1637, 0.05262, 0.3122, 0.1637, 0.0829, 0.0572),
            *(5.004, 0.0, 0.5079, 0.0, 0.539, 0.6617, 0.3153, 0.212),
        ),
        4: (
            *(1.777, 0.03068, 0.2141, 0.1438, 0.1241, 0.2978, 0.2319, 0.09625, 0.02248),
            *(10.54, 21.7, 8.105, 1.187, 0.5348, 0.3761, 0.01021, 0.1776),
        ),
    },
    "grid": {
        2: (3.195, 0.5236, 0.05871, 0.4257, 0.2577, 0.0, 0.4053, 0.8626, 0.0, 0.0),
        4: (2.35, 0.5939, 0.003257, 0.6647, 0.0, 0.1772, 0.9001, 0.8997, 3.467, 0.2715),
    },
    "stream": {
        2: (2.707, 0.6399, 0.2638, 0.1789, 0.1218, 1.061, 0.6305, 0.1048, 0.2991),
    },
    "launches": {
        2: (
            *(1.676, 1.244, 0.6588, 0.9451, 0.01529, 0.0, 3.089),
            *(1.813, 0.0, 0.5659, 0.3282, 3.714, 1.932, 2.239),
        ),
        4: (
            *(2.499, 1.89, 0.9488, 0.1302, 0.05391, 4.712, 3.638),
            *(0.8724, 1.083, 0.0, 0.3309, 6.585, 2.562, 3.002),
        ),
    },
}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache(maxsize=1024)
def sharings(widths: Widths, rows: int, itemsize: int, aligned: bool) -> tuple[Sharing, ...]:
    """The best of every kernel that serves a chain, the one of the least predicted time first.

    Args:
        widths: n_0 … n_L.
        rows: M.
        itemsize: bytes of a number.
        aligned: whether every row of every weight starts on 16 bytes.
    """
    every = (best(name, widths, rows, itemsize, aligned) for name in _US)
    able = [sharing for sharing in every if sharing is not None]
    return tuple(sorted(able, key=lambda s: microseconds(s, widths, rows, itemsize)))


def best(
    name: str, widths: Widths, rows: int, itemsize: int, aligned: bool = True
) -> Sharing | None:
    """The configuration of a kernel that is predicted to take the least time, or None."""
    if min(widths) < 1 or rows < 1 or len(widths) - 1 > MAX_LAYERS:
        return None
    call = widths, rows, itemsize
    found: Iterable[Sharing] = ()
    if name == "clusters":
        found = _clusters(*call, aligned)
    elif aligned and name == "grid":
        found = _grids(*call)
    elif aligned and name == "stream":
        found = _streams(*call)
    elif aligned:
        found = _launches(*call)
    return min(found, key=lambda c: microseconds(c, *call), default=None)


def _clusters(widths: Widths, rows: int, itemsize: int, aligned: bool) -> Iterator[Config]:
    """As few rows as let all clusters run at once, and in a step blocks that divide every K."""
    single, equal = itemsize == 4, len(set(widths)) == 1
    columns = max(column_tiles(n, itemsize) for n in widths[1:])
    depths = {_ceil_div(k * itemsize, 64) for k in widths[:-1]}
    for cluster, clusters in CLUSTERS.items():
        held = min(32, _ceil_div(_ceil_div(rows, clusters), 8) * 8)
        own = _ceil_div(columns, cluster)
        for groups, split_k in _WARPS:
            if groups > 1 and groups >= 2 * own:
                continue
            unroll = gcd(4, *(_ceil_div(depth, split_k) for depth in depths))
            ring = Config(cluster, held, groups, split_k, 1, unroll, simt=single)
            yield from _deepest(ring, (8, 4, 2), widths, itemsize)
            if single and held > 8:
                yield from _deepest(replace(ring, simt=False), (8, 4, 2), widths, itemsize)
            if equal and aligned and groups * split_k <= 8:
                direct = replace(ring, unroll=1, direct=True)
                yield from _deepest(direct, (16, 8, 4, 2), widths, itemsize)


def _deepest(
    config: Config, depths: Iterable[int], widths: Widths, itemsize: int
) -> Iterator[Config]:
    """With the first of these depths that can be built."""
    for depth in depths:
        deep = replace(config, depth=depth)
        spills = registers(deep) > min(255, _REGISTERS // (32 * config.warps))
        if not spills and deep.invalid(widths, itemsize) is None:
            yield deep
            return


def _grids(widths: Widths, rows: int, itemsize: int) -> Iterator[Grid]:
    """Weights of as many layers as fit lie in shared memory, two at least."""
    if len(set(widths)) > 1:
        return
    for cluster, groups in _GRIDS[itemsize]:
        tiles = _ceil_div(widths[0] // 8, CLUSTERS[cluster])
        grids = (
            Grid(cluster, tiles, slots, groups) for slots in range(min(len(widths) - 1, 16), 1, -1)
        )
        yield from islice((g for g in grids if g.invalid(widths, rows, itemsize) is None), 1)


def _streams(widths: Widths, rows: int, itemsize: int) -> Iterator[Stream]:
    """As many clusters as run at once, or fewer where the last ones would have no columns."""
    if itemsize != 2 or len(widths) < 3:
        return
    stay = _MIB * (32 if rows <= 64 else 24)  # of L2: more rows leave less to weights
    for cluster in (4, 8, 2):
        clusters = CLUSTERS[cluster]
        if len(set(widths)) == 1:
            tiles = stream_tiles(widths[0])
            clusters = _ceil_div(tiles, _ceil_div(tiles, clusters))
        one = Stream(cluster, clusters, 4, 1, stay_bytes=stay)
        own = one.slice_tiles(widths, rows)
        parts = (_ceil_div(own, count) for count in range(_ceil_div(own, _MOST_HELD), own + 1))
        streams = (
            replace(one, stages=stages, held=held, again=held if held == own else 1)
            for held, stages in product(parts, (12, 8, 6, 4))
        )
        yield from islice((s for s in streams if s.invalid(widths, rows) is None), 1)


def _launches(widths: Widths, rows: int, itemsize: int) -> Iterator[tuple[Launches, ...]]:
    """The best of each layer, and the best of those that hold for all: changes cost time."""
    able = _able_launches(_ceil_div(min(rows, MAX_BLOCK_ROWS), 8), itemsize)
    shapes = list(pairwise(widths))
    us = {s: [microseconds((c,), s, rows, itemsize) for c in able] for s in dict.fromkeys(shapes)}
    index = range(len(able))
    yield tuple(able[min(index, key=us[shape].__getitem__)] for shape in shapes)
    yield (able[min(index, key=lambda i: sum(us[shape][i] for shape in shapes))],) * len(shapes)


@lru_cache
def _able_launches(row_tiles: int, itemsize: int) -> list[Launches]:
    """Of each shape the first that can be built."""
    rows = 8 * row_tiles
    found = []
    for cluster, (columns, groups) in product((1, 2, 4, 8), _LAYER_WARPS):
        for per_unit, stages in product((2, 1), (5, 3)):
            c = Launches(cluster, 1, columns, groups, stages, 16, per_unit)
            spills = layer_registers(c, rows, itemsize) * 32 * c.warps * per_unit > _REGISTERS * 1.1
            if not spills and c.invalid(rows, itemsize) is None:
                found.append(c)
                break
    return found


def kernel(sharing: Sharing) -> str:
    """The kernel that it is for."""
    found = {Config: "clusters", Grid: "grid", Stream: "stream", tuple: "launches"}
    return found[type(sharing)]


def microseconds(sharing: Sharing, widths: Widths, rows: int, itemsize: int) -> float:
    """About how long a call takes on a Hopper, its weights being some of several in turn."""
    weights = _US[kernel(sharing)][itemsize]
    return sum(map(mul, weights, terms(sharing, widths, rows, itemsize)))


def terms(sharing: Sharing, widths: Widths, rows: int, itemsize: int) -> tuple[float, ...]:
    """What a call's time is a weighted sum of."""
    chain = _chain(widths, itemsize)
    if isinstance(sharing, Config):
        return _of_clusters(sharing, chain, rows)
    if isinstance(sharing, Grid):
        return _of_grid(sharing, chain, rows)
    if isinstance(sharing, Stream):
        return _of_stream(sharing, chain, rows)
    return _of_launches(sharing, chain, rows)


class _Chain(NamedTuple):
    """What the terms need of a chain.

    Attributes:
        widths: n_0 … n_L.
        itemsize: bytes of a number.
        shapes: (k, n) of a layer, and how many layers have it.
        cold: share of the weights that the L2 cache has not, where several chains take turns.
        vec: bytes at which every row of every weight starts, at most 16.
    """

    widths: Widths
    itemsize: int
    shapes: tuple[tuple[int, int, int], ...]
    cold: float
    vec: int

    @property
    def layers(self) -> int:
        return len(self.widths) - 1

    @property
    def equal(self) -> bool:
        """Whether all widths are."""
        return len(self.shapes) == 1 and self.widths[0] == self.widths[1]


@lru_cache(maxsize=1024)
def _chain(widths: Widths, itemsize: int) -> _Chain:
    shapes = tuple((k, n, times) for (k, n), times in Counter(pairwise(widths)).items())
    size = sum(k * n * times for k, n, times in shapes) * itemsize
    turn = max(2 * size, min(_TURNS * size, _TURN_BYTES))
    cold = 1 - _L2_BYTES / max(turn, _L2_BYTES)
    lengths = [k * itemsize for k in widths[:-1]]
    vec = min(16, *(length & -length for length in lengths))
    return _Chain(widths, itemsize, shapes, cold, vec)


def _of_clusters(c: Config, chain: _Chain, rows: int) -> tuple[float, ...]:
    """One; in a cluster; exchanges, by blocks of a cluster; passes by warps that share K, of widths
    that vary, of partial steps; results; steps; products by tensor cores and by plain
    multiply-adds, of all warps and of the first; copies, short ones; 100 KB of weights; exchanged
    10 KB."""
    widths, itemsize = chain.widths, chain.itemsize
    each = _ceil_div(_ceil_div(rows, c.rows), CLUSTERS[c.cluster])  # of a multiprocessor
    rounds = _ceil_div(each, min(each, _resident(c, widths, itemsize)))
    passes = steps = every = first = read = 0
    for k, n, times in chain.shapes:
        own, blocks = _ceil_div(column_tiles(n, itemsize), c.cluster), _ceil_div(k * itemsize, 64)
        here = times * _ceil_div(own, c.groups * c.tiles)
        before = _ceil_div(blocks, c.split_k * c.unroll) - 1
        passes += here
        steps += here * (before + 1)
        every += here * blocks * c.groups
        first += here * (before * c.unroll + min(c.unroll, blocks - before * c.split_k * c.unroll))
        read += times * own * 16 * k * itemsize
    clustered = c.cluster > 1
    exchanges = rounds * chain.layers * clustered
    passes, steps, parts = rounds * passes, rounds * steps, c.tiles * c.rows / 8
    products, own_products = each * every * parts / 1e3, rounds * first * parts / 1e2
    copies = 0.0 if c.direct else each * steps / rounds * c.warps * c.unroll * c.tiles / 1e2
    return (
        1.0,
        float(clustered),
        exchanges,
        exchanges * c.cluster / 10,
        passes * (c.split_k - 1) / 10,
        passes * (not chain.equal),
        0.0 if c.exact(widths, itemsize) else passes,
        passes * parts,
        0.0 if c.direct else steps,
        0.0 if c.simt else products,
        products if c.simt else 0.0,
        0.0 if c.simt else own_products,
        own_products if c.simt else 0.0,
        copies * 16 / chain.vec,
        each * read / 1e5 * (16 / chain.vec - 1),
        each * read / 1e5,
        each * sum(widths[1:-1]) * c.rows * itemsize / 1e4 * clustered,
    )


def _resident(c: Config, widths: Widths, itemsize: int) -> int:
    """Blocks that a multiprocessor holds at once."""
    shared = c.shared_bytes(widths, itemsize) + _SHARED_OF_A_BLOCK
    fit = _REGISTERS // (32 * c.warps * registers(c)), _SHARED_OF_A_UNIT // shared
    return max(1, min(*fit, 64 // c.warps))


def registers(c: Config) -> int:
    """About what a thread of ``whole.cu`` needs: sums, weights under way, and the rest."""
    sums = c.tiles * c.rows * (3 if c.simt else 1)
    return sums + 8 * c.tiles * (c.depth if c.direct else 1) + _OTHER_REGISTERS


def _of_grid(g: Grid, chain: _Chain, rows: int) -> tuple[float, ...]:
    """One; handovers; blocks of K that a warp reads; 10 KB of activations; products by tensor
    cores, by plain multiply-adds; sums; 10 KB of the first layer's weights; 100 KB of weights;
    10 KB that come late for want of slots."""
    width, layers, itemsize = chain.widths[0], chain.layers, chain.itemsize
    single, row_tiles, depth = itemsize == 4, _ceil_div(rows, 16), width // g.cluster
    blocks = depth * itemsize // 64 // g.k_groups
    halves = _ceil_div(2 * row_tiles, g.cluster)
    if single:
        rounds = halves * _ceil_div(g.tiles, 16)
    else:
        rounds = _ceil_div(halves * _ceil_div(g.tiles, 2), row_tiles * g.k_groups)
    layer = g.tiles * 8 * depth * itemsize  # bytes of a block
    return (
        1.0,
        layers - 1,
        (layers - 1) * blocks,
        (layers - 1) * row_tiles * 16 * depth * itemsize / 1e4,
        0.0 if single else layers * g.tiles * blocks / 10,
        layers * g.tiles * depth * row_tiles / 1e3 if single else 0.0,
        layers * rounds * g.cluster / 10,
        layer / 1e4,
        layers * layer / 1e5,
        max(0, layers - g.slots) * layer / 1e4,
    )


def _of_stream(s: Stream, chain: _Chain, rows: int) -> tuple[float, ...]:
    """One; handovers; steps along K, by column tiles of one and of two groups' rows; 100 KB of
    weights; sums; 10 KB of activations; layers of widths that vary."""
    groups, row_tiles = k_groups(rows), _ceil_div(rows, 16)
    steps = read = sums = taken = 0
    for k, n, times in chain.shapes:
        tiles = _ceil_div(stream_tiles(n), s.clusters)
        count = times * _ceil_div(k, 64 * s.cluster * groups)
        steps += count
        read += count * tiles * groups * 1024
        sums += times * _ceil_div(_ceil_div(tiles * row_tiles, s.cluster), 8)
        taken += count * groups * 128 * row_tiles * 16
    products = steps * s.tiles(chain.widths) / 10
    return (
        1.0,
        chain.layers - 1,
        steps,
        products if groups == 2 else 0.0,
        products if groups == 1 else 0.0,
        read / 1e5,
        sums * s.cluster / 10,
        taken / 1e4,
        chain.layers * (not chain.equal),
    )


def layer_registers(c: Launches, rows: int, itemsize: int) -> int:
    """About what a thread of ``launches.cu`` needs: sums, weights, and the rest."""
    row_tiles, parts = _ceil_div(min(rows, MAX_BLOCK_ROWS), 8), itemsize // 2
    return c.tiles * parts * (4 * row_tiles + 16) + _OTHER_REGISTERS


def _of_launches(configs: tuple[Launches, ...], chain: _Chain, rows: int) -> tuple[float, ...]:
    """One; further launches, configured otherwise; waves; steps along K; thousands of products,
    hundreds of a warp; 100 KB of weights, of memory; 100 KB of x, in parts, in rounds of loads;
    sums; thousands of blocks."""
    itemsize, found = chain.itemsize, [0.0] * 10
    slices, row_tiles = _ceil_div(rows, MAX_BLOCK_ROWS), _ceil_div(min(rows, MAX_BLOCK_ROWS), 8)
    shapes = zip(configs, chain.widths, chain.widths[1:], strict=False)
    for (c, k, n), times in Counter(shapes).items():
        blocks, room = c.blocks(n) * slices, CLUSTERS[c.cluster] * c.cluster
        each = _ceil_div(blocks, room)
        waves = times * _ceil_div(each, min(each, _resident_layers(c, rows, itemsize)))
        count = _ceil_div(_ceil_div(k * itemsize, 64), c.cluster)
        steps = waves * _ceil_div(count, c.k_groups)
        tiles, busy, parts = c.tiles * c.columns, times * each * count, _ceil_div(count, c.x_blocks)
        here = (
            waves,
            steps,
            busy * tiles * row_tiles / 1e3,
            steps * c.tiles * row_tiles / 1e2,
            busy * tiles * 1024 / 1e5,
            busy * row_tiles * 512 / 1e5,
            waves * parts,
            waves * parts * _ceil_div(min(count, c.x_blocks) * row_tiles, 8 * c.warps) / 10,
            times * each * row_tiles * tiles * c.k_groups / 1e2,
            times * blocks / 1e3,
        )
        found = [a + b for a, b in zip(found, here, strict=True)]
    read, changes = found[4], sum(a != b for a, b in pairwise(configs))
    return (1.0, len(configs) - 1, changes, *found[:5], read * chain.cold, *found[5:])


def _resident_layers(c: Launches, rows: int, itemsize: int) -> int:
    """Blocks of ``launches.cu`` that a multiprocessor holds at once."""
    granted = min(_REGISTERS // (32 * c.warps * c.per_unit), layer_registers(c, rows, itemsize))
    shared = c.shared_bytes(rows) + _SHARED_OF_A_BLOCK
    fit = _REGISTERS // (32 * c.warps * granted), _SHARED_OF_A_UNIT // shared, 64 // c.warps
    return max(c.per_unit, min(fit))
