"""Tile configurations of the Hopper product, and which one a size takes. Touches no device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastlinear.kernels.cuda.hopper import BK, SHARED_LIMIT


def writes_directly(n: int) -> bool:
    """Whether rows of y (M, n) begin where TMA cannot store."""
    return n % 8 != 0


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule of the GEMM.

    Attributes:
        bm, bn: output tile of one consumer (pingpong) or of both together.
        stages: depth of the shared-memory pipeline, in steps of 64 along K.
        cluster: blocks along M that share (multicast) one B tile.
        pingpong: consumers own alternate tiles, so one's epilogue hides under the other's wgmma.
        out_bufs: staging buffers (16 rows x 64 columns) per warp for the TMA stores.
        group_m: row tiles (of bm * cluster) visited before moving to the next column.
    """

    bm: int
    bn: int
    stages: int
    cluster: int = 2
    pingpong: bool = True
    out_bufs: int = 1
    group_m: int = 8

    @property
    def rows_per_consumer(self) -> int:
        """Rows of one consumer warpgroup's accumulator."""
        return self.bm if self.pingpong else self.bm // 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: operand stages, store staging, barriers."""
        stage = (self.bm + self.bn) * BK * 2
        return self.stages * (stage + 16) + 8 * self.out_bufs * 16 * 64 * 2

    def invalid(self) -> str | None:
        """Why this configuration cannot be built, or None."""
        if self.rows_per_consumer % 64 or self.bm > 256:
            return f"bm {self.bm}: each consumer needs a multiple of 64 rows, at most 256 in all"
        if self.bn % 64 or self.bn > 256 or self.bn % (self.cluster * 8):
            return f"bn {self.bn}: not a multiple of 64 that splits into {self.cluster} parts"
        if self.rows_per_consumer * self.bn > 128 * 192:
            return f"{self.rows_per_consumer}x{self.bn} accumulators do not fit the registers"
        if self.out_bufs < 1 or self.bn // 64 % self.out_bufs:
            return f"{self.out_bufs} staging buffers are not used evenly by {self.bn} columns"
        if self.stages < 2 or self.shared_bytes > SHARED_LIMIT:
            return f"{self.shared_bytes} bytes of shared memory with {self.stages} stages"
        return None


_SM_COUNT = 132
# Candidates with their relative rates, measured on an H200: storing the output, and storing the
# pre-activation as well.
_CANDIDATES: tuple[tuple[Config, float, float], ...] = (
    (Config(128, 192, 4, out_bufs=3, group_m=4), 1.0, 1.0),
    (Config(128, 192, 4, cluster=1, out_bufs=3, group_m=16), 0.995, 0.995),
    (Config(128, 128, 6, cluster=1, out_bufs=2, group_m=16), 0.96, 0.94),
    (Config(128, 64, 8), 0.75, 0.75),
    (Config(128, 64, 8, cluster=1), 0.72, 0.72),
    (Config(64, 64, 12), 0.51, 0.51),
    (Config(64, 64, 12, cluster=1), 0.45, 0.45),
)
# The same where rows of y are odd, and there for the gradients' products, without an activation.
_ODD_CANDIDATES: tuple[tuple[Config, float, float], ...] = (
    _CANDIDATES[0],
    (Config(128, 128, 6, cluster=1, out_bufs=2, group_m=16), 0.92, 0.92),
    *_CANDIDATES[3:],
)
_ODD_PLAIN: tuple[tuple[Config, float, float], ...] = (
    _CANDIDATES[0],
    (Config(128, 256, 4, pingpong=False), 1.0, 1.0),
    (Config(256, 128, 4, pingpong=False), 0.98, 0.98),
    (Config(128, 128, 6, cluster=1, out_bufs=2, group_m=16), 0.85, 0.85),
    *_CANDIDATES[3:],
)
_WASTE = 0.25  # of what columns beyond the last tile's take: the power their share goes in with
_UNHIDDEN = 0.5  # of a tile's time: its first operands and its last epilogue
_SHARED_WEIGHTS = 1 << 24  # from so many on narrow tiles gain by reading B once for two blocks


def config_for(M: int, K: int, N: int, save_pre: bool = False, activation: str = "relu") -> Config:
    """The tile configuration for y (M, N) = x (M, K) @ weight (N, K)ᵀ: least time in waves."""
    odd = writes_directly(N)
    candidates = _CANDIDATES
    if odd:
        candidates = _ODD_PLAIN if activation == "none" else _ODD_CANDIDATES

    def time(config: Config, plain: float, saving: float) -> float:
        if config.bm * (config.cluster - 1) >= M:
            return math.inf  # blocks of a cluster without any row
        if config.bn == 64 and config.cluster > 1 and K * N < _SHARED_WEIGHTS:
            return math.inf
        tiles = -(-M // (config.bm * config.cluster)) * -(-N // config.bn)
        waves = -(-tiles // (_SM_COUNT // config.cluster))
        rate = saving if save_pre else plain
        used = (N / (-(-N // config.bn) * config.bn)) ** _WASTE if odd else 1.0
        return (waves + _UNHIDDEN) * config.bm * config.bn / (rate * used)

    return min(candidates, key=lambda candidate: time(*candidate))[0]
