"""How backend ``whole_cuda`` of mlp shares a chain out among blocks and warps. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fastlinear.families.mlp.cuda.grid import Grid
from fastlinear.families.mlp.cuda.launches import MAX_BLOCK_ROWS, Launches
from fastlinear.families.mlp.cuda.stream import Stream, column_tiles

_SHARED_LIMIT = 232_448  # bytes a Hopper block may have
_MIB = 1 << 20

Widths = tuple[int, ...]
"""n_0 … n_L."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Config:
    """How one chain is shared out.

    Attributes:
        cluster: blocks that share one block of rows; each computes its part of every layer's
            columns.
        rows: rows of x per cluster, a multiple of 8.
        groups: groups of warps in a block, each with its own columns.
        split_k: warps of a group, each with its own part of K.
        tiles: column tiles (of 16) a group computes at a time.
        unroll: 64-byte blocks of K per pipeline step.
        depth: pipeline steps of weights on their way.
        bulk: exchange by one bulk copy per pair of blocks instead of stores from every thread.
        simt: float32 only: plain multiply-adds instead of split tf32 products.
        direct: weights go from global memory straight to registers, ``depth`` 64-byte blocks of K
            per warp. For equal widths of whole passes.
        late: how many of those blocks are fetched only after a layer's results were sent.
    """

    cluster: int
    rows: int
    groups: int
    split_k: int
    tiles: int = 1
    unroll: int = 1
    depth: int = 8
    bulk: bool = False
    simt: bool = False
    direct: bool = False
    late: int = 0

    @property
    def warps(self) -> int:
        """Warps of one block."""
        return self.groups * self.split_k

    def shared_bytes(self, widths: Widths, itemsize: int) -> int:
        """Dynamic shared memory: barriers, weights under way, activations, staging, sums."""
        ring = 0 if self.direct else self.warps * self.depth * self.unroll * self.tiles * 1024
        activations = 2 * input_units(widths, itemsize) * (self.rows * 16 + 32)
        stage = self.warps * itemsize * 128
        parts = self.tiles * self.rows // 8
        sums = self.groups * parts * self.split_k * 512 if self.split_k > 1 else 0
        each = [_ceil_div(_column_tiles(n, itemsize), self.cluster) for n in widths[1:]]
        return 64 + ring + activations + stage + sums + 16 * itemsize * sum(each)

    def invalid(self, widths: Widths, itemsize: int) -> str | None:
        """Why this configuration cannot be built for these widths, or None."""
        if self.cluster not in (1, 2, 4, 8, 16):
            return f"cluster {self.cluster}: not 1, 2, 4, 8 or 16"
        if self.rows % 8 or not 8 <= self.rows <= 64:
            return f"rows {self.rows}: not a multiple of 8 up to 64"
        if not 1 <= self.warps <= 16 or (self.split_k > 1 and self.groups > 15):
            return f"{self.groups} groups of {self.split_k} warps"
        if min(self.tiles, self.unroll) < 1 or self.depth < 2:
            return f"tiles {self.tiles}, unroll {self.unroll}, depth {self.depth}"
        if self.simt and itemsize != 4:
            return "plain multiply-adds are for float32"
        if self.tiles * self.rows > (32 if self.simt else 64):
            return f"{self.tiles} tiles of {self.rows} rows do not fit the registers"
        if self.direct and not self._direct_fits(widths, itemsize):
            return "weights held in registers need equal widths, in whole blocks and one pass"
        needed = self.shared_bytes(widths, itemsize)
        if needed > _SHARED_LIMIT:
            return f"{needed} bytes of shared memory, more than {_SHARED_LIMIT}"
        return None

    def _direct_fits(self, widths: Widths, itemsize: int) -> bool:
        width = widths[0]
        return (
            len(set(widths)) == 1
            and self.unroll == 1
            and self.late <= self.depth
            and width % (self.depth * self.split_k * (64 // itemsize)) == 0
            and width == 16 * self.cluster * self.groups * self.tiles
        )

    def exact(self, widths: Widths, itemsize: int) -> bool:
        """Whether every layer is a whole number of steps and passes, so nothing is masked."""
        k_step = self.split_k * self.unroll * (64 // itemsize)
        n_step = 16 * self.cluster * self.groups * self.tiles
        return all(k % k_step == 0 for k in widths[:-1]) and all(
            n % n_step == 0 for n in widths[1:]
        )


def _column_tiles(n: int, itemsize: int) -> int:
    """Column tiles (of 16) of a layer of n columns, padded to 64 bytes."""
    return _ceil_div(n * itemsize, 64) * (4 // itemsize)


def input_units(widths: Widths, itemsize: int) -> int:
    """Units (16 bytes of columns) of the widest input of a layer, padded to 64 bytes."""
    return 4 * max(_ceil_div(k * itemsize, 64) for k in widths[:-1])


MAX_GRID_WIDTH = 2048
"""Of chains that `grid_for` shares out; in float32 and beyond 64 rows 1024. In 16-bit dtypes the
wider ones are those that `stream_for` has too many layers for."""

# Clusters of so many blocks that an H200 runs at once: not every GPC has all its SMs.
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}


def config_for(widths: Widths, rows: int, itemsize: int, aligned: bool = True) -> Config:
    """The sharing for a chain of these widths over that many rows, as measured on an H200.

    Args:
        widths: n_0 … n_L.
        rows: M.
        itemsize: bytes of an element.
        aligned: whether every row of every weight starts on 16 bytes.
    """
    for config in _candidates(max(widths), rows, itemsize):
        fitting = config
        while fitting.invalid(widths, itemsize) and fitting.depth > 2 and not fitting.direct:
            fitting = replace(fitting, depth=fitting.depth - 1)
        if fitting.invalid(widths, itemsize) is None and (aligned or not fitting.direct):
            return fitting
    raise AssertionError(f"no configuration for {widths}, {rows} rows")


def grid_for(widths: Widths, rows: int, itemsize: int) -> Grid | None:
    """The sharing over all multiprocessors where that is faster, measured on an H200, or None.

    Weights must start on 16 bytes, rows included.
    """
    width = widths[0]
    if len(widths) < 3 or len(set(widths)) != 1 or not 512 <= width <= MAX_GRID_WIDTH:
        return None
    if itemsize == 4:
        if width > 1024 or rows > 64 or (width < 640 and rows <= 32):
            return None
        order = [(8, 1), (4, 1)]
    elif rows > 64:
        if width > 1024 or rows > 128:
            return None
        order = [(8, 1), (4, 1)]
    elif width < 640:
        return None
    elif rows <= 32:
        order = [(4, 2), (8, 2)] if rows <= 16 else [(8, 2), (4, 2)]
    else:  # one or two warps to add up all partial sums would be slow
        order = [(4, 2), (8, 1), (4, 1)]
    grids = (make_grid(widths, rows, itemsize, *choice) for choice in order)
    return next((grid for grid in grids if grid is not None), None)


def make_grid(
    widths: Widths,
    rows: int,
    itemsize: int,
    cluster: int = 8,
    k_groups: int = 1,
) -> Grid | None:
    """The sharing over as many clusters of so many blocks as run at once, or None.

    Weights of as many layers as fit lie in shared memory, two at least.
    """
    tiles = _ceil_div(widths[0] // 8, CLUSTERS[cluster])
    for slots in range(min(len(widths) - 1, 16), 1, -1):
        grid = Grid(cluster, tiles, slots, k_groups)
        if grid.invalid(widths, rows, itemsize) is None:
            return grid
    return None


def stream_for(widths: Widths, rows: int, itemsize: int) -> Stream | None:
    """The sharing of a 16-bit chain whose weights stream over all multiprocessors, or None.

    Two layers or more, 16-byte aligned rows of weights, and a width beyond 1024, or equal ones
    where that is faster than `grid_for`, measured on an H200.
    """
    if itemsize != 2 or len(widths) < 3:
        return None
    if max(widths) > 1024:
        return make_stream(widths, rows)
    width = widths[0] if len(set(widths)) == 1 else 0
    if rows <= 32 or (rows <= 64 and width == 1024):
        return make_stream(widths, rows, 8) if width >= 896 else None
    gains = width >= 768 if rows > 64 else 896 <= width < 1024
    return make_stream(widths, rows) if gains else None


def make_stream(widths: Widths, rows: int, cluster: int = 4) -> Stream | None:
    """The sharing over as many clusters as run at once, as deep as shared memory allows.

    None where that cannot be built.
    """
    clusters = CLUSTERS[cluster]
    if len(set(widths)) == 1:  # fewer where as many columns each leave the last ones without any
        tiles = column_tiles(widths[0])
        clusters = _ceil_div(tiles, _ceil_div(tiles, clusters))
    # Fewer rows leave more of the L2 cache to weights that stay there from call to call.
    stay = _MIB * (32 if rows <= 64 else 24)
    single = Stream(cluster, clusters, 4, 1, stay_bytes=stay)
    own = single.slice_tiles(widths, rows)
    most = 2 if rows <= 64 and own >= 8 else 4  # measured on an H200
    for phases in range(1, own + 1):
        held = _ceil_div(own, phases)
        stream = replace(single, held=held, again=held if phases == 1 else 1)
        if held <= most and stream.invalid(widths, rows) is None:
            break
    else:
        return None
    for stages in range(12 if rows <= 64 else 6, 4, -2):  # more gain nothing
        deeper = replace(stream, stages=stages)
        if deeper.invalid(widths, rows) is None:
            return deeper
    return stream


MAX_LAUNCHES_ROWS = 2 * MAX_BLOCK_ROWS
"""Of chains that `launches_for` shares out: weights are read once for 64 rows."""


def launches_for(widths: Widths, rows: int, itemsize: int) -> tuple[Launches, ...] | None:
    """The sharing of each layer, one launch a layer, where that is faster, measured on an H200.

    None elsewhere. Rows of every weight must start on 16 bytes.
    """
    if any(k * itemsize % 16 for k in widths[:-1]) or min(widths) < 1:
        return None
    if itemsize == 2:
        served = min(widths) >= 4096 and 8 <= rows <= 16
        return (Launches(8, 2, 8, stages=3, x_blocks=16),) * (len(widths) - 1) if served else None
    if max(widths) <= 1024 or not 8 <= rows <= MAX_LAUNCHES_ROWS:
        return None
    return tuple(_single_launch(n, rows) for n in widths[1:])


def _single_launch(n: int, rows: int) -> Launches:
    """The sharing of a float32 layer of n outputs."""
    if rows <= 32:
        if rows <= 8 and n <= 2048:
            return Launches(8, 1, 4, stages=16, x_blocks=16)
        return Launches(8, 1, 8, stages=8, x_blocks=16)
    if rows > MAX_BLOCK_ROWS:
        return Launches(8, 1, 8, stages=5, x_blocks=16)

    def work(launches: Launches) -> int:
        """Columns of one cluster, times how often all clusters that run at once are needed."""
        clusters = launches.blocks(n) // launches.cluster
        return _ceil_div(clusters, 2 * CLUSTERS[launches.cluster]) * launches.columns

    ways = ((8, 1, 5), (6, 1, 7), (4, 2, 5))  # columns, groups along K, stages
    return min((Launches(8, 1, c, g, stages=s, x_blocks=16) for c, g, s in ways), key=work)


def _rows_for(rows: int, cluster: int, most: int) -> int:
    """Rows of one cluster: as few as let all clusters run at once, at most ``most``."""
    each = _ceil_div(_ceil_div(rows, CLUSTERS[cluster]), 8) * 8
    return min(each, most)


def _candidates(width: int, rows: int, itemsize: int) -> list[Config]:
    """Preferred configurations, best first; the last one fits every chain."""
    single = itemsize == 4
    most = 16 if width > 512 and single else 32  # so that two inputs fit shared memory

    def share(cluster: int, groups: int, split_k: int, **rest: Any) -> Config:
        each = _rows_for(rows, cluster, most)
        return Config(cluster, each, groups, split_k, **rest, simt=single)

    if width <= 128 and rows > 512:  # enough rows for every SM: no exchange
        wide = [share(1, 8, 1, unroll=2)] if width > 64 else []
        return [*wide, share(1, 4, 1)]
    if width <= 64:
        return [share(4, 1, 4) if single else share(1, 4, 1, unroll=2)]
    if width <= 128:
        return [share(8, 1, 4, unroll=2) if single else share(4, 2, 2, unroll=2)]
    if width <= 256:
        held = share(8, 2, 2, depth=8 if single else 4, direct=True)
        ring = share(8, 2, 4, unroll=2) if single else share(8, 2, 2, unroll=4)
        return [held, ring] if held.rows == 8 else [ring]
    if width <= 512:
        if single:
            held = share(8, 2, 4, tiles=2, depth=8, direct=True)
            ring = share(8, 4, 4, unroll=2)
        elif rows <= 8 * CLUSTERS[16]:
            held, ring = share(16, 2, 2, depth=8, direct=True), share(16, 2, 2, unroll=2, depth=10)
        else:
            held, ring = share(8, 4, 1, depth=16, direct=True), share(8, 4, 2, unroll=2, depth=10)
        return [held, ring, share(8, 4, 2)] if held.rows == 8 else [ring, share(8, 4, 2)]
    if single:
        held = share(16, 2, 4, tiles=2, depth=8, direct=True)
        ring = share(16, 2, 4, tiles=2, depth=3)
        return [held, ring, share(16, 2, 2)] if held.rows == 8 else [ring, share(16, 2, 2)]
    held = share(16, 4, 2, depth=16, bulk=True, direct=True)
    rings = [share(16, 4, 4, unroll=2), share(16, 4, 4), share(16, 4, 2)]
    return [held, *rings] if held.rows <= 16 else rings
