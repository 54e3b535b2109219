"""Launch configurations of the Triton backend: pure data and pure choices, no Triton import."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

ACTIVATIONS = (
    "none",
    "relu",
    "relu2",
    "silu",
    "gelu",
    "gelu_tanh",
    "sigmoid",
    "tanh",
    "quick_gelu",
    "leaky_relu",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Largest shared memory of one block in bytes, and multiprocessors of the common part.
_SHARED_BYTES = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448}
_SHARED_BYTES |= {100: 232_448, 103: 232_448, 110: 232_448, 120: 101_376, 121: 101_376}
_UNITS = {80: 108, 86: 84, 87: 16, 89: 128, 90: 132, 100: 148, 103: 148, 120: 170}
_TMA_MIN_WORK = 1 << 28  # M*N*K from which persistent TMA pays for its dearer launch
_MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class GemmConfig:
    """One way to launch a matrix multiplication (ROWS, DEPTH) x (DEPTH, COLS).

    Attributes:
        kind: ``"tma"`` (persistent, tensor descriptors, sm_90 and later) or ``"pointer"``.
        block_r, block_c, block_d: tile sizes over ROWS, COLS, DEPTH.
        warps, stages: warps of a program, depth of the load pipeline.
        group_r: tile rows walked together for L2 reuse.
        subtile: column parts of the epilogue (tma only), 1 or 2.
        flatten: whether loads of the next tile may run under the epilogue (tma only).
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
    flatten: bool = True
    programs_per_unit: int = 1
    splits: int = 1

    def shared_bytes(self, itemsize: int) -> int:
        """Estimated shared memory of one program."""
        ring = self.stages * (self.block_r + self.block_c) * self.block_d * itemsize
        if self.kind == "pointer":
            return ring
        return ring + self.block_r * self.block_c // self.subtile * itemsize + 256

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
        if self.kind == "tma" and arch < 90:
            return "tensor descriptors need compute capability 9.0"
        if self.subtile not in (1, 2) or self.splits < 1 or self.stages < 1:
            return "subtile must be 1 or 2, splits and stages at least 1"
        limit = _SHARED_BYTES.get(arch, 101_376)
        if self.shared_bytes(dtype.itemsize) * self.programs_per_unit > limit:
            return f"needs more than {limit} bytes of shared memory"
        return None


def _pointer_config(rows: int, cols: int, itemsize: int, arch: int) -> GemmConfig:
    """Largest pointer tile that still fills the chip."""
    depth = 64 if itemsize == 2 else 32
    units = _UNITS.get(arch, 108)
    roomy = _SHARED_BYTES.get(arch, 101_376) > 160_000
    shapes = [(128, 256, 8, 3), (128, 128, 4, 4)] if roomy else [(128, 128, 4, 3)]
    shapes += [(64, 128, 4, 4), (64, 64, 4, 4), (32, 64, 4, 4), (16, 64, 2, 4)]
    fitting = [s for s in shapes if s[0] < 2 * rows or s[0] == 16]
    for r, c, warps, stages in fitting:
        if -(-rows // r) * -(-cols // c) >= units:
            return GemmConfig("pointer", r, c, depth, warps, stages)
    r, c, warps, stages = fitting[-1] if rows <= 32 else (64, 64, 4, 4)
    return GemmConfig("pointer", r, c, depth, warps, stages)


@lru_cache(maxsize=1024)
def config_for(
    M: int, K: int, N: int, dtype: torch.dtype, capability: tuple[int, int], tma: bool = True
) -> GemmConfig:
    """The configuration of the forward (M, K) x (K, N); ``tma``: whether strides allow it."""
    arch = capability[0] * 10 + capability[1]
    if tma and arch >= 90 and dtype.itemsize == 2 and M * N * K >= _TMA_MIN_WORK:
        wide = GemmConfig("tma", 128, 256, 64, 8, 3, subtile=2)
        narrow = GemmConfig("tma", 128, 128, 64, 8, 3, subtile=2)
        tiles = -(-M // 128) * -(-N // 256)
        best = wide if tiles >= _UNITS.get(arch, 132) else narrow
        if best.problem(dtype, capability) is None:
            return best
    return _pointer_config(M, N, dtype.itemsize, arch)


@lru_cache(maxsize=1024)
def grad_config_for(
    rows: int, cols: int, depth: int, dtype: torch.dtype, capability: tuple[int, int], tma: bool
) -> GemmConfig:
    """Configuration of a backward product (rows, depth) x (depth, cols).

    DEPTH is split when the tiles alone cannot fill the chip and each slice stays long.
    """
    config = config_for(rows, depth, cols, dtype, capability, tma)
    arch = capability[0] * 10 + capability[1]
    tiles = -(-rows // config.block_r) * -(-cols // config.block_c)
    units = _UNITS.get(arch, 108)
    splits = min(units // tiles, depth // (8 * config.block_d), 16)
    return replace(config, splits=max(1, splits))


def reason_not(
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    activation: str,
    x_strides: tuple[int, ...],
    w_strides: tuple[int, ...],
    capability: tuple[int, int],
) -> str | None:
    """Why the Triton backend cannot serve a linear_act call, or None when it can.

    Args:
        M, K, N: x is (M, K), weight (N, K).
        dtype: of x, weight and bias.
        activation: name of the activation.
        x_strides, w_strides: strides in elements; any non-negative ones are served.
        capability: CUDA compute capability of the device.
    """
    if capability < (8, 0):
        return f"needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    if dtype not in DTYPES:
        return f"serves float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if activation not in ACTIVATIONS:
        return f"does not know the activation {activation!r}"
    if max(M, K, N) > _MAX_INT // 2:
        return f"sizes must stay below 2^30, got M={M}, K={K}, N={N}"
    if any(not 0 <= s <= _MAX_INT for s in (*x_strides, *w_strides)):
        return f"strides must be 0 to 2^31 - 1, got {x_strides} and {w_strides}"
    return None
