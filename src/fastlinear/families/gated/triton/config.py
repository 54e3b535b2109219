"""Launch configurations of the Triton backends: pure data and pure choices, no Triton import."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest shared memory of one block in bytes.
SHARED_BYTES = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448}
SHARED_BYTES |= {100: 232_448, 103: 232_448, 110: 232_448, 120: 101_376, 121: 101_376}
_MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class ProductConfig:
    """One way to launch a product with the gate in its epilogue.

    Attributes:
        block_m, block_n, block_k: tokens and hidden features of a tile, depth at a time.
        warps, stages: warps of a program, depth of the load pipeline.
        group_m: tile rows walked together for L2 reuse.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8

    def shared_bytes(self, operands: int, itemsize: int) -> int:
        """Estimated shared memory: one block of tokens, ``operands`` of hidden features."""
        rows = self.block_m + operands * self.block_n
        return self.stages * rows * self.block_k * itemsize


# Larger tiles spill on every architecture: both pre-activations and three results are in registers.
_PRODUCTS = (
    ProductConfig(128, 64, 64, 8, 3),
    ProductConfig(64, 64, 64, 4, 3),
    ProductConfig(32, 64, 64, 4, 4),
    ProductConfig(16, 32, 128, 4, 4),
)
# before Hopper the operands of the matrix units take registers as well
_BACKWARD_80 = (ProductConfig(64, 64, 64, 8, 3), *_PRODUCTS[2:])


@lru_cache(maxsize=1024)
def product_config(
    piece: str, m: int, h: int, units: int, capability: tuple[int, int]
) -> ProductConfig:
    """The largest tile that fits the architecture and gives most multiprocessors one."""
    arch = capability[0] * 10 + capability[1]
    limit = SHARED_BYTES.get(arch, min(SHARED_BYTES.values()))
    operands = 2 if piece == "forward" else 1
    candidates = _BACKWARD_80 if piece == "backward" and capability < (9, 0) else _PRODUCTS
    fitting = [
        c
        for c in candidates
        if c.shared_bytes(operands, 2) <= limit and (c.block_m < 2 * m or c is candidates[-1])
    ]
    for config in fitting:
        if 4 * -(-m // config.block_m) * -(-h // config.block_n) >= 3 * units:
            return config
    return fitting[-1]


def reason_not(
    m: int, k: int, h: int, n: int, dtype: torch.dtype, capability: tuple[int, int], fused: bool
) -> str | None:
    """Why a Triton backend cannot serve a call of such sizes, or None when it can.

    Args:
        m, k, h, n: as of a Problem; n is 0 without a down projection.
        fused: whether the backend's products are its own.
    """
    if capability < (8, 0):
        return f"needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    served = DTYPES[1:] if fused else DTYPES
    if dtype not in served:
        names = ", ".join(str(d).removeprefix("torch.") for d in served)
        return f"serves {names}, not {str(dtype).removeprefix('torch.')}"
    if max(m, k, h, n) > _MAX_INT // 512:
        return f"sizes must stay below 2^22, got M={m} K={k} H={h} N={n}"
    return None
