"""Launch configurations of the Triton backend: pure data and pure choices, no Triton import."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RESIDENT = 256
"""In features up to which a group's weight stays on the chip while x streams by."""

# Largest shared memory of one block in bytes, and multiprocessors of the common part.
SHARED_BYTES = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448}
SHARED_BYTES |= {100: 232_448, 103: 232_448, 110: 232_448, 120: 101_376, 121: 101_376}
_MOST = {2: (32, 256), 4: (32, 64)}
"""Item size → in and out features up to which dW fits a program's registers, elsewhere and on
Hopper, whose matrix units read both operands from shared memory."""
MOST_SIGNS = 128
"""In and out features up to which signs are read as fast as a derivative that was formed before."""
_SHARES_BYTES = 1 << 28  # largest float32 workspace of dW's chunks
_BEGIN_TILES = 2  # tiles that take as long as what a program does before its first
_SUMS_TILES = 5  # and as shares of dW, written, read and added up
_MAX_INT = 2**31 - 1
_TF32X3_MIN_DEPTH = 48


@dataclass(frozen=True)
class ProductConfig:
    """One way to launch y_g = x_g W_gᵀ.

    Attributes:
        block_m, block_n: tokens and outputs of a tile.
        block_k: inputs at a time; 0 where all of W's stay on the chip.
        warps, stages: warps of a program, depth of the load pipeline.
        tiles: tiles of tokens that a program walks (1 where W streams).
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    tiles: int = 1

    def shared_bytes(self, k: int, itemsize: int) -> int:
        """Estimated shared memory of one program whose weight stays on the chip."""
        held = sum(parts(k)) * (self.block_n + self.stages * self.block_m)
        return (held + self.block_m * self.block_n) * itemsize


@dataclass(frozen=True)
class BackwardConfig:
    """One way to launch the single-pass backward.

    Attributes:
        block_m, block_k: tokens of a tile, and columns of x.
        warps, stages: warps of a program, depth of the load pipeline.
        programs: about how many share the tiles of all groups.
        shared: whether no more run at once, and one may have tiles of several groups.
        dpre_first: whether a launch of its own forms dpre and db, where the derivative takes more
            registers than dW leaves.
    """

    block_m: int
    block_k: int
    warps: int
    stages: int
    programs: int
    shared: bool = False
    dpre_first: bool = False


@dataclass(frozen=True)
class WeightConfig:
    """One way to launch the tiled dW: tokens at a time, tile of dW, tiles of tokens a program
    walks."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    tiles: int


def padded(size: int) -> int:
    """The power of two that holds ``size``, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@lru_cache(maxsize=1024)
def parts(size: int) -> tuple[int, int, int]:
    """Up to three powers of two, at least 16 and falling, that reach ``size`` together; 0 for none.

    >>> parts(100), parts(64), parts(250)
    ((64, 32, 16), (64, 0, 0), (256, 0, 0))
    """
    whole = -(-size // 16) * 16
    found = [1 << bit for bit in reversed(range(4, whole.bit_length())) if whole >> bit & 1]
    if len(found) > 3:  # round the smallest up
        return parts(sum(found[:2]) + 2 * found[2])
    return (*found, *(0,) * (3 - len(found)))  # type: ignore[return-value]


_SUMMED = 4096  # numbers that a program of one output sums at a time
FORWARD_PRECISION = "tf32x3"
"""Scheme of a forward's float32 products (16-bit ones ignore it), whatever precision the user
allows. Plain float32 arithmetic takes 4 to 5 times as long for narrow groups and is about as exact:
6.3e-8, 8.8e-8 and 1.2e-7 at depths of 8, 16 and 32, three TF32 products 7.1e-8, 7.8e-8 and 9.7e-8;
torch's own float32 4.7e-8, 5.9e-8 and 7.8e-8 (H200, against float64)."""


def dot_precision(depth: int) -> str:
    """The same of a backward's products: one pass over narrow groups has more than products to do,
    where plain float32 arithmetic takes 0.7 to 0.9 of the time at depths of 8 to 36, 1.25 at 48.
    """
    return "tf32x3" if depth >= _TF32X3_MIN_DEPTH else "ieee"


def chunk_tiles(tiles: int, groups: int, programs: int) -> int:
    """Tiles of tokens each program walks, for about ``programs`` programs over all groups."""
    chunks = max(1, min(tiles, programs // groups))
    return -(-tiles // chunks)


class Walk(NamedTuple):
    """How programs share the tiles of all groups, one after another.

    Attributes:
        room: tiles that a group is given, all that it has or more.
        each: tiles of a program.
        programs: how many there are.
        chunks: the most of them that take tiles of one group.
    """

    room: int
    each: int
    programs: int
    chunks: int

    @property
    def shared(self) -> bool:
        """Whether a program may have tiles of several groups."""
        return self.room % self.each != 0

    @classmethod
    def apart(cls, tiles: int, groups: int, programs: int) -> Walk:
        """Of about so many programs each has tiles of one group only, two or more if there are."""
        each = chunk_tiles(tiles, groups, min(programs, groups * -(-tiles // 2)))
        chunks = -(-tiles // each)
        return cls(chunks * each, each, groups * chunks, chunks)

    @classmethod
    def quickest(cls, tiles: int, groups: int, programs: int, shared: bool) -> Walk:
        """Whichever ends first where so many programs run at once: chunks of one group for each,
        or where ``shared``, equally many tiles of one group and then the next."""

        def cost(chunks: int) -> int:
            waves = -(-groups * chunks // programs)
            each = -(-tiles // chunks) + _BEGIN_TILES
            return waves * each + (_SUMS_TILES if chunks > 1 else 0)

        chunks = min(range(1, max(2, min(tiles, 8 * programs // groups) + 1)), key=cost)
        each = -(-tiles * groups // programs)
        if not shared or each + _BEGIN_TILES + _SUMS_TILES >= cost(chunks):
            return cls.apart(tiles, groups, groups * chunks)
        whole = not (tiles % each and each % tiles)
        chunks = -(-tiles // each) if whole else (tiles - 1) // each + 2
        return cls(tiles, each, -(-tiles * groups // each), chunks)


@lru_cache(maxsize=1024)
def product_config(
    tokens: int,
    groups: int,
    k: int,
    n: int,
    itemsize: int,
    units: int,
    capability: tuple[int, int],
    across: bool = False,
) -> ProductConfig:
    """The configuration of a product of ``tokens`` rows a group, (K) → (N).

    Args:
        across: whether tokens lie side by side, and features apart.

    Four warps on 64 tokens: on an H200 eight are up to twice as slow, and more tokens no faster.
    float32 on tensor cores is half as slow again with three stages as with two.
    """
    hopper = capability[0] == 9
    warps = 8 if not hopper and (itemsize == 4 or k > 128) else 4  # else it would spill
    limit = SHARED_BYTES.get(capability[0] * 10 + capability[1], min(SHARED_BYTES.values()))
    if itemsize == 2:
        block_m, block_n = min(64, padded(tokens)), min(128, padded(n))
        streaming = ProductConfig(block_m, block_n, 64, warps, 3)
    else:
        block_m, block_n = min(64, padded(tokens)), min(64, padded(n))
        streaming = ProductConfig(block_m, block_n, 32, warps, 3)
    if n == 1 and not (across and itemsize == 2):  # sums of what goes from memory to registers
        block_k = min(_SUMMED // 16, padded(k))
        return ProductConfig(min(_SUMMED // block_k, padded(tokens)), 1, block_k, 4, 1)
    resident = MAX_RESIDENT if itemsize == 2 else MAX_RESIDENT // 2 if hopper else 64
    if k > resident:
        return streaming
    tiles = -(-tokens // block_m)
    programs = groups * -(-n // block_n) * tiles
    most = 4 if itemsize == 4 or k <= 16 or 64 < k <= 128 else 2 if k <= 128 else 8
    walked = max(1, min(most, tiles, programs // (4 * units)))
    deep = (4,) if 16 < k <= 32 else ()
    for stages in (*deep, 3, 2) if itemsize == 2 else (2,):
        config = ProductConfig(block_m, block_n, 0, warps, stages, walked)
        if config.shared_bytes(k, itemsize) <= limit:
            return config
    return streaming


def batch_invariant_config(k: int, n: int, itemsize: int) -> ProductConfig:
    """The one configuration of all numbers of tokens: a token is summed in the same order."""
    block_n = min(128 if itemsize == 2 else 64, padded(n))
    return ProductConfig(64, block_n, min(64 if itemsize == 2 else 32, padded(k)), 4, 3)


@lru_cache(maxsize=1024)
def backward_config(
    tokens: int,
    groups: int,
    k: int,
    n: int,
    itemsize: int,
    units: int,
    capability: tuple[int, int],
    activation: str,
    sign_mask: bool = False,
    channels: bool = False,
) -> BackwardConfig | None:
    """The configuration of the single-pass backward; None for groups whose dW is too large.

    Args:
        sign_mask: these were saved.
        channels: tokens lie side by side.
    """
    widest = max(padded(k), padded(n))
    if widest > _MOST[itemsize][capability[0] == 9]:
        return None
    if itemsize == 4:
        programs = 4 * units // -(-k // 64)
        spills = widest == 64 and activation != "none"
        return BackwardConfig(32, min(64, padded(k)), 4, 2, programs, dpre_first=spills)
    # as fast as any of a sweep on an H200, where a launch of its own for the derivative costs less
    # than what it takes from the products, but with signs and for the cheapest in the smallest
    # groups
    small = widest <= 32
    block_m = 128 if small and tokens > 64 else 64
    hopper = capability[0] == 9
    warps = 4 if hopper else 8  # else it would spill, as would 64 tokens of eight warps
    saved = activation != "none"
    if widest > 128:
        how = (8, 3, max(1, units // -(-k // 128)), True)
    elif widest > 64:
        how = (8, 4 if channels and not sign_mask else 3, units, True)
    elif small and saved and not sign_mask and activation in ("relu", "leaky_relu"):
        block_m, saved = 64 if hopper else block_m, False
        how = (warps, 4 if widest == 16 else 2, 2 * units, False)
    else:
        how = (warps, 4 if small and sign_mask else 3, (3 if small else 2) * units, False)
    return BackwardConfig(block_m, min(128, padded(k)), *how, dpre_first=saved and not sign_mask)


@lru_cache(maxsize=1024)
def weight_config(
    tokens: int,
    groups: int,
    k: int,
    n: int,
    itemsize: int,
    units: int,
    capability: tuple[int, int],
) -> WeightConfig:
    """The configuration of the tiled dW: enough programs to fill the chip, while the float32 shares
    stay within bounds."""
    widest = 128 if itemsize == 2 and capability[0] == 9 else 64
    block_m = 32 if itemsize == 4 else 64
    block_n, block_k = min(widest, padded(n)), min(widest, padded(k))
    programs = groups * -(-n // block_n) * -(-k // block_k)
    most = max(1, _SHARES_BYTES // (4 * groups * n * k))
    tiles = chunk_tiles(-(-tokens // block_m), programs, min(2 * units, most * programs))
    return WeightConfig(block_m, block_n, block_k, 8 if block_n * block_k > 8192 else 4, 3, tiles)


def fits(k: int, n: int) -> bool:
    """Whether groups of K to N features are whole tiles of the kernel for wide groups."""
    return k % 64 == 0 and n % 128 == 0 and min(k, n) >= 128


def reason_not(
    tokens: int, groups: int, k: int, n: int, dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Why the Triton backend cannot serve a call of such sizes, or None when it can."""
    if capability < (8, 0):
        return f"needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    if dtype not in DTYPES:
        return f"serves float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if max(tokens, groups * k, groups * n) > _MAX_INT // 256:
        return f"sizes must stay below 2^23, got {tokens} tokens and {groups} groups of {k} → {n}"
    if groups > 65535:
        return f"serves at most 65535 groups, the call has {groups}"
    return None
