"""One way to launch a Triton matrix multiplication, and where it can run: no Triton import."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Largest shared memory of one block in bytes, and multiprocessors of the common part.
_SHARED_BYTES = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448}
_SHARED_BYTES |= {100: 232_448, 103: 232_448, 110: 232_448, 120: 101_376, 121: 101_376}
UNITS = {80: 108, 86: 84, 87: 16, 89: 128, 90: 132, 100: 148, 103: 148, 120: 170}
"""Multiprocessors of the common part of a compute capability, tens and ones."""


@dataclass(frozen=True)
class GemmConfig:
    """One way to launch a matrix multiplication (ROWS, DEPTH) x (DEPTH, COLS).

    Attributes:
        kind: ``"tma"`` (persistent, tensor descriptors, sm_90 and later) or ``"pointer"``.
        block_r, block_c, block_d: tile sizes over ROWS, COLS, DEPTH.
        warps, stages: warps of a program, depth of the load pipeline.
        group_r: tile rows walked together for L2 reuse.
        subtile: column parts of the epilogue (tma only), 1 or 2.
        programs_per_unit: persistent programs on each multiprocessor (tma only).
        splits: slices of DEPTH summed by a second kernel in a fixed order.
    """

    kind: str
    block_r: int
    block_c: int
    block_d: int
    warps: int
    stages: int
    group_r: int = 8
    subtile: int = 1
    programs_per_unit: int = 1
    splits: int = 1

    def shared_bytes(self, itemsize: int) -> int:
        """Estimated shared memory of one program."""
        ring = self.stages * (self.block_r + self.block_c) * self.block_d * itemsize
        if self.kind == "pointer":
            return ring
        result = itemsize if self.splits == 1 else 4
        return ring + self.block_r * self.block_c // self.subtile * result + 256

    def problem(self, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
        """Why this configuration cannot run there, or None. The one validity predicate."""
        arch = capability[0] * 10 + capability[1]
        sizes = (self.block_r, self.block_c, self.block_d, self.warps)
        if self.kind not in ("tma", "pointer"):
            return f"kind must be tma or pointer, not {self.kind!r}"
        if any(s < 1 or s & (s - 1) for s in sizes) or min(sizes[:3]) < 16:
            return "blocks must be powers of two of at least 16, warps a power of two"
        if self.block_r * self.block_c > self.warps * 32 * 128:
            return "more than 128 accumulators a thread: it would spill"
        if dtype.itemsize == 4 and arch < 90 and self.block_r * self.block_c > 64 * 128:
            return "three TF32 products of such a tile spill without warpgroup products"
        if self.kind == "tma" and arch < 90:
            return "tensor descriptors need compute capability 9.0"
        if self.subtile not in (1, 2) or self.splits < 1 or self.stages < 1:
            return "subtile must be 1 or 2, splits and stages at least 1"
        limit = _SHARED_BYTES.get(arch, 101_376)
        if self.shared_bytes(dtype.itemsize) * self.programs_per_unit > limit:
            return f"needs more than {limit} bytes of shared memory"
        return None
