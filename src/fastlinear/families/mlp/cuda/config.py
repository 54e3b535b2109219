"""How ``whole.cu`` shares a chain out among blocks and warps. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

_SHARED_LIMIT = 232_448  # bytes a Hopper block may have

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
        simt: float32 only: plain multiply-adds instead of split tf32 products.
        direct: weights go from global memory straight to registers, ``depth`` 64-byte blocks of K
            per warp. For equal widths of whole passes.
    """

    cluster: int
    rows: int
    groups: int
    split_k: int
    tiles: int = 1
    unroll: int = 1
    depth: int = 8
    simt: bool = False
    direct: bool = False

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
        each = [_ceil_div(column_tiles(n, itemsize), self.cluster) for n in widths[1:]]
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


def column_tiles(n: int, itemsize: int) -> int:
    """Column tiles (of 16) of a layer of n columns, padded to 64 bytes."""
    return _ceil_div(n * itemsize, 64) * (4 // itemsize)


def input_units(widths: Widths, itemsize: int) -> int:
    """Units (16 bytes of columns) of the widest input of a layer, padded to 64 bytes."""
    return 4 * max(_ceil_div(k * itemsize, 64) for k in widths[:-1])


CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}
"""Blocks of a cluster → clusters that run at once: not every GPC has all its SMs."""
