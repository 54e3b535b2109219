"""Tile configurations of the gated products on Hopper, and which one a size takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fastlinear.kernels.cuda.hopper import BK, SHARED_LIMIT

UNITS = 132  # multiprocessors of the devices that the rates were measured on


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule of one kernel.

    Attributes:
        bm: rows of a tile, of one consumer (pingpong) or of both together.
        bn: columns of a tile's product: in the forward two for each hidden feature.
        stages: depth of the shared-memory pipeline, in steps of 64 along the depth.
        cluster: blocks along the rows that share a tile of weights, 1 or 2.
        pingpong: consumers own alternate tiles, so that one's epilogue hides under the other's
            product.
        group_m: row tiles (of bm * cluster) visited before the next column.
        sets: of the backward: blocks of the pre-activations that a warp has room for, 2 to 4.
        block: columns of such a block, 32 or 64.
    """

    bm: int
    bn: int
    stages: int
    cluster: int = 2
    pingpong: bool = True
    group_m: int = 8
    sets: int = 2
    block: int = 64

    @property
    def rows_per_consumer(self) -> int:
        """Rows of one consumer warpgroup's accumulator."""
        return self.bm if self.pingpong else self.bm // 2

    def shared_bytes(self, piece: str) -> int:
        """Dynamic shared memory of the kernel of a piece."""
        pipeline = self.stages * ((self.bm + self.bn) * BK * 2 + 16)
        if piece == "backward":
            block = 16 * self.block * 2
            return pipeline + 8 * (2 * self.sets + 2) * block + 8 * self.sets * 8
        return pipeline + 8 * (self.bn // 64) * 16 * 32 * 2

    def invalid(self, piece: str) -> str | None:
        """Why this configuration cannot be built, or None."""
        if self.rows_per_consumer % 64 or self.bm > 256:
            return f"bm {self.bm}: each consumer needs a multiple of 64 rows, at most 256 in all"
        if self.bn % 64 or self.bn > 256 or self.cluster not in (1, 2):
            return f"bn {self.bn}, cluster {self.cluster}: multiples of 64 columns, 1 or 2 blocks"
        if self.rows_per_consumer * self.bn > 128 * 192:
            return f"{self.rows_per_consumer}x{self.bn} accumulators do not fit the registers"
        if self.sets not in (2, 3, 4) or self.block not in (32, 64):
            return f"{self.sets} sets of {self.block} columns: 2 to 4, of 32 or 64"
        if piece == "backward" and self.bn > 128 and self.block > 32:
            return f"no registers for sums of {self.block} columns beside {self.bn}"
        if self.stages < 2 or self.shared_bytes(piece) > SHARED_LIMIT:
            return f"{self.shared_bytes(piece)} bytes of shared memory with {self.stages} stages"
        return None


# Candidates with their relative rates: of development runs on an H200 at 4096 to 16384 tokens, at
# 128 to 1024 and, those of 64 rows, at 16 and 64.
CANDIDATES: dict[str, tuple[tuple[Config, float], ...]] = {
    "forward": (
        (Config(128, 192, 5, group_m=4), 1.0),
        (Config(128, 192, 5, cluster=1, group_m=16), 1.0),
        (Config(128, 128, 6, cluster=1, group_m=16), 0.97),
        (Config(128, 128, 6), 0.93),
        (Config(64, 192, 6, cluster=1), 0.75),
        (Config(64, 128, 8, cluster=1), 0.72),
    ),
    "backward": (
        (Config(128, 128, 4, cluster=1, group_m=16), 1.0),
        (Config(128, 128, 4), 0.98),
        (Config(128, 192, 4, cluster=1, group_m=16, block=32), 1.075),
        (Config(64, 128, 5, cluster=1), 0.75),
        (Config(64, 64, 8, cluster=1), 0.55),
    ),
}
_UNHIDDEN = 0.5  # of a tile's time: its first operands and its last epilogue
# Of the forward's rate without clusters, by how often the rows hold 128: few tiles, each of which
# reads the weights for itself.
_APART = {2: 0.87, 3: 0.92, 4: 0.92}


@lru_cache(maxsize=1024)
def config_for(piece: str, m: int, h: int) -> Config:
    """The tile configuration for M tokens and H hidden features: least time in waves."""
    columns = 2 * h if piece == "forward" else h

    def time(candidate: tuple[Config, float]) -> float:
        config, rate = candidate
        if config.bm * (config.cluster - 1) >= m:
            return math.inf  # blocks of a cluster without any row
        if piece == "forward" and config.cluster == 1:
            rate *= _APART.get(-(-m // 128), 1.0)
        tiles = -(-m // (config.bm * config.cluster)) * -(-columns // config.bn)
        waves = -(-tiles // (UNITS // config.cluster))
        return (waves + _UNHIDDEN) * config.bm * config.bn / rate

    return min(CANDIDATES[piece], key=time)[0]
