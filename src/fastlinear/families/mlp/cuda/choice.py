"""Which configuration a call of ``whole_cuda`` takes: predicted times of all four kernels.

A time is a weighted sum of a few terms: bytes, steps of a pipeline, products, exchanges, launches.
The weights are fitted to launches on an H200. Pure arithmetic.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from operator import mul

from fastlinear.families.mlp.cuda.config import CLUSTERS, Config, Widths
from fastlinear.families.mlp.cuda.grid import Grid
from fastlinear.families.mlp.cuda.launches import MAX_BLOCK_ROWS, Launches
from fastlinear.families.mlp.cuda.stream import Stream, column_tiles, k_groups

Sharing = Config | Grid | Stream | tuple[Launches, ...]
"""How a chain is shared out: one launch, or one a layer."""

_UNITS = 132
_SHARED_OF_A_UNIT, _SHARED_OF_A_BLOCK = 233_472, 1024  # what one has, and takes besides
_REGISTERS, _OTHER_REGISTERS = 65_536, 48
_L2_BYTES = 40e6  # what it keeps of weights
_TURNS, _TURN_BYTES = 24, 120e6  # most weights that are read in turn, and their size

# Microseconds of each kernel's terms: 16-bit numbers, float32.
_US: dict[str, dict[int, tuple[float, ...]]] = {
    "clusters": {
        2: (
            1.9,
            0.3,
            0.15,
            0.5,
            0.8,
            0.08,
            0.15,
            0.04,
            8.0,
            0.0,
            0.5,
            0.4,
            1.0,
            0.2,
            0.1,
            0.1,
            1.0,
        ),
        4: (
            1.5,
            0.5,
            0.45,
            0.4,
            0.6,
            0.1,
            0.12,
            0.04,
            17.0,
            24.0,
            0.5,
            0.4,
            0.8,
            0.2,
            0.1,
            0.1,
            1.0,
        ),
    },
    "grid": {
        2: (3.8, 1.4, 0.01, 0.06, 0.05, 0.0, 0.05, 0.01, 0.2, 0.3, 1.1, 0.5),
        4: (4.5, 2.0, 0.01, 0.05, 0.0, 0.35, 0.05, 0.0, 0.2, 0.3, 1.5, 0.6),
    },
    "stream": {
        2: (3.5, 0.62, 0.037, 0.03, 0.12, 0.27, 0.72, 0.6, 0.24, 0.03, 0.13, 0.45, 0.02),
    },
    "launches": {
        2: (2.7, 1.7, 0.5, 0.02, 2.3, 0.6, 0.8, 0.8, 2.0, 0.3, 1.0, 0.5),
        4: (2.7, 1.7, 0.52, 0.02, 7.1, 0.5, 0.5, 0.76, 2.5, 0.34, 2.1, 0.47),
    },
}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


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
    cold = out_of_memory(widths, itemsize)
    if isinstance(sharing, Config):
        return _of_clusters(sharing, widths, rows, itemsize, cold)
    if isinstance(sharing, Grid):
        return _of_grid(sharing, widths, rows, itemsize, cold)
    if isinstance(sharing, Stream):
        return _of_stream(sharing, widths, rows, cold)
    return _of_launches(sharing, widths, rows, itemsize, cold)


def out_of_memory(widths: Widths, itemsize: int) -> float:
    """Share of the weights that the L2 cache has not, where several chains take turns."""
    size = sum(k * n for k, n in pairwise(widths)) * itemsize
    turn = max(2 * size, min(_TURNS * size, _TURN_BYTES))
    return 1 - _L2_BYTES / max(turn, _L2_BYTES)


def _cold_bytes(widths: Widths, itemsize: int, cold: float) -> float:
    """100 KB that each multiprocessor reads from memory, where they share the weights."""
    return sum(k * n for k, n in pairwise(widths)) * itemsize * cold / _UNITS / 1e5


def _of_clusters(
    c: Config, widths: Widths, rows: int, itemsize: int, cold: float
) -> tuple[float, ...]:
    """One; in a cluster; layers without and with an exchange by stores or bulk copies; passes;
    steps of a ring, of registers; thousands of products by tensor cores, by plain multiply-adds;
    100 KB of weights, from memory, by all; trips; exchanged 10 KB; sums; short copies."""
    each = _ceil_div(_ceil_div(rows, c.rows), CLUSTERS[c.cluster])  # of a multiprocessor
    at_once = min(each, _resident(c, widths, itemsize))
    rounds = _ceil_div(each, at_once)
    layers = len(widths) - 1
    passes = steps = read = 0
    for (k, n), times in Counter(pairwise(widths)).items():
        own = _ceil_div(column_units(n, itemsize), c.cluster)
        here = times * _ceil_div(own, c.groups * c.tiles)
        passes += here
        steps += here * _ceil_div(_ceil_div(k * itemsize, 64), c.split_k * c.unroll)
        read += times * own * 16 * k * itemsize
    products = each * c.warps * steps * c.unroll * c.tiles * c.rows / 8e3
    exchanged = sum(widths[1:-1]) * c.rows * itemsize * each / 1e4 * (c.cluster > 1)
    ahead = c.warps * c.depth * c.unroll * c.tiles * 1024
    vec = min(16, *((k * itemsize) & -(k * itemsize) for k in widths[:-1]))
    rounds_of_layers = rounds * layers
    return (
        1.0,
        float(c.cluster > 1),
        rounds_of_layers * (c.cluster == 1),
        rounds_of_layers * (c.cluster > 1 and not c.bulk),
        rounds_of_layers * (c.cluster > 1 and c.bulk),
        rounds * passes,
        0.0 if c.direct else rounds * steps,
        rounds * steps if c.direct else 0.0,
        0.0 if c.simt else products,
        products if c.simt else 0.0,
        each * read / 1e5,
        each * read / 1e5 * cold,
        _cold_bytes(widths, itemsize, cold),
        rounds * read / ahead,
        rounds * passes * (c.split_k > 1),
        exchanged,
        each * read / 1e5 * (16 / vec - 1),
    )


def column_units(n: int, itemsize: int) -> int:
    """Column tiles (of 16) of a layer of n columns, padded to 64 bytes."""
    return _ceil_div(n * itemsize, 64) * (4 // itemsize)


def _resident(c: Config, widths: Widths, itemsize: int) -> int:
    """Blocks that a multiprocessor holds at once."""
    shared = c.shared_bytes(widths, itemsize) + _SHARED_OF_A_BLOCK
    fit = _REGISTERS // (32 * c.warps * registers(c)), _SHARED_OF_A_UNIT // shared
    return max(1, min(*fit, 64 // c.warps))


def registers(c: Config) -> int:
    """About what a thread of ``whole.cu`` needs: sums, weights under way, and the rest."""
    sums = c.tiles * c.rows * (3 if c.simt else 1)
    return sums + 8 * c.tiles * (c.depth if c.direct else 1) + _OTHER_REGISTERS


def _of_grid(g: Grid, widths: Widths, rows: int, itemsize: int, cold: float) -> tuple[float, ...]:
    """One; handovers, by blocks that share K; 10 KB of activations; products by tensor cores, by
    plain multiply-adds; sums; layers of two warps; 10 KB of the first layer's weights; 100 KB of
    weights, from memory; 10 KB that come late for want of slots."""
    width, layers = widths[0], len(widths) - 1
    row_tiles, own = _ceil_div(rows, 16), width // g.cluster
    halves = _ceil_div(2 * row_tiles, g.cluster)
    layer = g.tiles * 8 * own * itemsize  # bytes of a block
    single = itemsize == 4
    products = layers * g.tiles * own / 1e2
    return (
        1.0,
        layers - 1,
        (layers - 1) * g.cluster,
        (layers - 1) * row_tiles * 16 * own * itemsize / 1e4,
        0.0 if single else products / g.k_groups / 3.2,
        products * row_tiles / 1e1 if single else 0.0,
        layers * halves * _ceil_div(g.tiles, 2) * g.cluster / 1e1,
        layers * (g.k_groups - 1),
        layer / 1e4,
        layers * layer / 1e5,
        layers * layer / 1e5 * cold,
        max(0, layers - g.slots) * layer / 1e4,
    )


def _of_stream(s: Stream, widths: Widths, rows: int, cold: float) -> tuple[float, ...]:
    """One; handovers, by blocks that share K; steps along K, by column tiles; parts of a slice;
    100 KB of weights, from memory; trips; sums; 10 KB of activations; layers of widths that vary;
    tiles asked for again."""
    groups, row_tiles = k_groups(rows), _ceil_div(rows, 16)
    widest, layers = s.tiles(widths), len(widths) - 1
    steps = parts = read = sums = taken = 0
    for (k, n), times in Counter(pairwise(widths)).items():
        tiles = _ceil_div(column_tiles(n), s.clusters)
        count = _ceil_div(k, 64 * s.cluster * groups)
        steps += times * count
        parts += times * (_ceil_div(count, s.held) - 1)
        read += times * tiles * count * groups * 1024
        sums += times * _ceil_div(_ceil_div(tiles * row_tiles, s.cluster), 8)
        taken += times * count * groups * 128 * row_tiles * 16
    return (
        1.0,
        layers - 1,
        (layers - 1) * s.cluster,
        steps,
        steps * widest / 1e1,
        parts,
        read / 1e5,
        read / 1e5 * cold,
        read / (s.stages * _ceil_div(widest, 2) * 2048),
        sums * s.cluster,
        taken / 1e4,
        float(layers * (len(set(widths)) > 1)),
        steps * min(s.again, s.held),
    )


def layer_registers(c: Launches, rows: int, itemsize: int) -> int:
    """About what a thread of ``launches.cu`` needs: sums, weights, and the rest."""
    row_tiles, parts = _ceil_div(min(rows, MAX_BLOCK_ROWS), 8), itemsize // 2
    return c.tiles * parts * (4 * row_tiles + 16) + _OTHER_REGISTERS


def _of_launches(
    configs: tuple[Launches, ...], widths: Widths, rows: int, itemsize: int, cold: float
) -> tuple[float, ...]:
    """One; further launches; waves; steps along K; thousands of products; 100 KB of weights, from
    memory; trips; 100 KB of x, in parts; hundreds of sums; layers of clusters."""
    found = [0.0] * 9
    slices, row_tiles = _ceil_div(rows, MAX_BLOCK_ROWS), _ceil_div(min(rows, MAX_BLOCK_ROWS), 8)
    for (c, k, n), times in Counter(zip(configs, widths, widths[1:], strict=False)).items():
        blocks = c.blocks(n) * slices
        room = CLUSTERS[c.cluster] * c.cluster
        each, waves = _ceil_div(blocks, room), _ceil_div(blocks, room * c.per_unit)
        count = _ceil_div(_ceil_div(k * itemsize, 64), c.cluster)
        steps = _ceil_div(count, c.k_groups)
        outputs = 16 * c.tiles * c.columns
        here = (
            waves,
            waves * steps,
            each * count * c.columns * c.tiles * row_tiles / 1e3,
            each * outputs * count * 64 / 1e5,
            waves * steps / c.stages,
            each * row_tiles * 8 * count * 64 / 1e5,
            waves * _ceil_div(count, c.x_blocks),
            each * row_tiles * c.tiles * c.columns * c.k_groups / 1e2,
            c.cluster > 1,
        )
        found = [a + times * b for a, b in zip(found, here, strict=True)]
    read = found[3]
    return (1.0, len(configs) - 1, *found[:4], read * cold, *found[4:])
