"""What a kernel on a GPU takes at best, in microseconds: the unit in which its work is priced.

A price then says how many times as long it takes; curves and flags are what the model leaves out.
The rates are those of a Hopper chip. Another chip's are in its prices, but for its number of
multiprocessors, which waves are counted by.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, gcd

import torch

from fastlinear.core.device import device_facts
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import STEP
from fastlinear.dispatch.work import CALL, HOST, Work, call, host

_UNITS, _CAPABILITY = 132, (9, 0)  # where there is no GPU to ask
_BYTES_PER_US = 3.0e6
_FLOPS_PER_US = {"float64": 0.42e6, "float32": 0.42e6, "tf32": 3.5e6, "half": 7.0e6}
"""Of one multiprocessor."""
_THREE_TF32 = 1.1e6  # the same of a float32 product as three of TF32
_WAVE_US, _SPLIT_US = 0.6, 1.0  # filling a wave's pipelines; adding up what split sums left
_LEAST_DEPTH = 128  # of a split sum's part
_WIDE_LOAD = 16  # bytes, and numbers by which Triton knows that rows begin at such
_LINE = 128  # bytes that L2 brings in at once
Tiles = tuple[tuple[int, int, float], ...]
Launched = tuple[int, int, int]
"""What is known of a launch: rows and columns of a tile, slices of the depth."""
LIBRARY: Tiles = (
    *((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75)),
    *((64, 64, 0.6), (64, 32, 0.4), (32, 64, 0.4), (32, 32, 0.3)),
)
"""Tiles of PyTorch's products: rows, columns, share of the rate."""
OURS: Tiles = (*LIBRARY[2:], (16, 64, 0.25), (16, 32, 0.2))
"""Tiles of our kernels."""
LARGE: Tiles = LIBRARY[2:6]
FEW_ROWS: Tiles = ((16, 16, 0.15),)
_SHARES = {rows * columns: share for rows, columns, share in reversed(OURS)}


def units() -> int:
    """The multiprocessors of the current GPU, or a Hopper's where there is none."""
    return device_facts("cuda").units if torch.cuda.is_available() else _UNITS


def capability() -> tuple[int, int]:
    """The compute capability of the current GPU, or a Hopper's where there is none."""
    return device_facts("cuda").capability if torch.cuda.is_available() else _CAPABILITY


def bytes_us(p: Problem, numbers: float) -> float:
    """Reading or writing so many numbers once."""
    return numbers * FLOAT_DTYPES[p.dtype].itemsize / _BYTES_PER_US


def flops_per_us(p: Problem, *, ours: bool = False) -> float:
    """The rate of a multiprocessor's products; ``ours``: float32 as three TF32 products."""
    if p.dtype in ("bfloat16", "float16"):
        return _FLOPS_PER_US["half"]
    if p.dtype == "float32" and p.precision != "highest":
        return _FLOPS_PER_US["tf32"]
    return _THREE_TF32 if ours and p.dtype == "float32" else _FLOPS_PER_US[p.dtype]


@lru_cache(maxsize=1 << 14)
def tiled_us(
    m: int,
    k: int,
    n: int,
    itemsize: int,
    rate: float,
    tiles: Tiles,
    groups: int,
    split: bool,
    every: int,
    launched: Launched | None = None,
) -> float:
    """(m, k) @ (k, n) in whole waves of tiles, or its bytes: the best of the tiles.

    Args:
        rate: operations a microsecond of a multiprocessor.
        groups: so many products at once.
        split: whether sums are split where there are fewer tiles than multiprocessors.
        every: multiprocessors.
        launched: the tile and its slices where they are known.
    """
    best = float("inf")
    if launched is not None:
        area = launched[0] * launched[1]
        nearest = min(_SHARES, key=lambda known: abs(known - area))
        tiles = ((launched[0], launched[1], _SHARES[nearest]),)
    for rows, columns, share in tiles:
        count = ceil(m / rows) * ceil(n / columns) * groups
        parts = {1} if launched is None else {launched[2]}
        if launched is None and split and count < every:
            parts.add(max(1, min(every // count, k // _LEAST_DEPTH)))
        for part in parts:
            wave = 2 * rows * columns * ceil(k / part) / (rate * share) + _WAVE_US
            best = min(best, ceil(count * part / every) * wave + _SPLIT_US * (part > 1))
    moved = itemsize * groups * (m * k + k * n + m * n) / _BYTES_PER_US
    return float((best**2 + moved**2) ** 0.5)


def tiled(
    kind: str,
    p: Problem,
    m: int,
    k: int,
    n: int,
    layout: str = "nt",
    *flags: str,
    tiles: Tiles = LIBRARY,
    triton: bool = False,
    launched: Launched | None = None,
    plain: bool = False,
    rows: tuple[int, int, int] | None = None,
) -> tuple[Work, ...]:
    """A launch that multiplies (m, k) @ (k, n), of a Problem's dtype.

    Args:
        layout: how the operands lie: ``"n"`` along the rows, ``"t"`` along the columns.
        flags: more facts.
        triton: whether Triton compiled the kernel: it loads 16 bytes at once only where rows are
            of multiples of 16 numbers.
        launched: the tile and its slices where they are known.
        plain: whether a kernel of ours multiplies float32 as it is, without matrix units.
        rows: numbers from row to row of both operands and the result; dense as ``layout`` says if
            not given.
    """
    flags += ("plain",) if plain else ()
    if launched is not None:
        flags += f"tile:{launched[0]}x{launched[1]}", *(("sliced",) if launched[2] > 1 else ())
    itemsize = FLOAT_DTYPES[p.dtype].itemsize
    inner = rows or dense_rows(m, k, n, layout)
    rate = flops_per_us(p, ours=tiles is not LIBRARY and not plain)
    sizes = {"m": m, "k": k, "n": n, "mn": m * n, "mkn": m * k * n, "kn": k * n, "mk": m * k}
    variants = (
        (layout, layout != "nt"),
        *of_rows(itemsize, inner, triton=triton),
        ("m=1", m == 1),
        ("n=1", n == 1),
        ("shallow", k <= 4),
    )
    unaligned = (
        f"{a}:{load}"
        for a, row in zip("abc", inner, strict=True)
        if (load := gcd(row * itemsize, _LINE)) < _LINE
    )
    us = tiled_us(m, k, n, itemsize, rate, tiles, 1, True, units(), launched)
    return (
        call(kind),
        Work(
            f"{kind} product",
            us,
            sizes,
            (*unaligned, *flags),
            tuple(v for v, is_ in variants if is_),
        ),
    )


def dense_rows(m: int, k: int, n: int, layout: str) -> tuple[int, int, int]:
    """Numbers from row to row of operands and result that are dense."""
    return k if layout[0] == "n" else m, k if layout[1] == "t" else n, n


def of_rows(
    itemsize: int, rows: tuple[int, ...], *, triton: bool = False
) -> tuple[tuple[str, bool], ...]:
    """How the narrowest load of such rows is worse than 16 bytes, as (variant, whether)."""
    load = min(gcd(row * itemsize, _WIDE_LOAD) for row in rows)
    unknown = triton and load == _WIDE_LOAD and any(row % _WIDE_LOAD for row in rows)
    return (f"aligned to {load}", load < _WIDE_LOAD), ("not by 16", unknown)


def rows_at(p: Problem, row: int) -> tuple[str, ...]:
    """The same of a pass over rows of so many numbers, as a flag."""
    load = gcd(row * FLOAT_DTYPES[p.dtype].itemsize, _WIDE_LOAD)
    return (f"rows:{load}",) if load < _WIDE_LOAD else ()


def swept(
    name: str,
    p: Problem,
    rows: int,
    row: int,
    activation: str,
    *flags: str,
    times: int = 2,
    folded: bool = False,
) -> tuple[Work, ...]:
    """One elementwise launch over rows of numbers.

    Args:
        times: how often each is read or written.
        folded: whether odd rows are read together, as ``kernels.row_tiles`` has them.
    """
    at = () if folded else rows_at(p, row)
    return call(name, 1.0, activation, *flags), fused(
        name, p, rows, row, activation, *flags, times=times, at=at
    )


def fused(
    name: str,
    p: Problem,
    rows: int,
    row: int,
    activation: str,
    *flags: str,
    times: int = 2,
    at: tuple[str, ...] | None = None,
) -> Work:
    """What such a pass adds to a kernel that is launched anyhow. ``at``: as ``rows_at`` has it."""
    sizes = {"numbers": rows * row, "n": row}
    us = bytes_us(p, times * rows * row)
    at = rows_at(p, row) if at is None else at
    return Work(f"{name} pass", us, sizes, (*flags, *at), (activation,))


EPILOGUE = " epilogue"
"""How the name of what comes after a product ends."""
_TORCH = ("torch", "eager", "addcmul", "baddbmm", "loop", "conv", "cublaslt")


def hosts(p: Problem, backend: str, works: Iterable[Work]) -> tuple[Work, ...]:
    """What the host pays for these launches, beside what the device does.

    PyTorch's ops are called from Python, or by autograd. Ours are recorded, and run without Python;
    so are both in a node of autograd.
    """
    calls = [w for w in works if w.kind.endswith(CALL) and not _in_another(w)]
    launches = sum(w.units for w in calls)
    if p.piece == STEP or (backend in _TORCH and not p.needs_grad):
        name = f"{p.family} {'autograd' if p.piece == STEP else 'eager'}"
        return host(name), host(f"{name} op", launches)
    ops = sum(w.units for w in calls if not set(w.kind.split()).isdisjoint(_TORCH))
    counted = (("recorded", 1.0), ("recorded op", ops), ("recorded launch", launches - ops))
    return tuple(host(name, times) for name, times in counted if times)


def _in_another(call: Work) -> bool:
    """Whether no launch of its own does it: epilogues of ours; PyTorch's of a bias alone."""
    return call.kind.endswith(EPILOGUE + CALL) and (
        "eager" not in call.kind.split() or "none" in call.flags
    )


def on_device(works: Iterable[Work]) -> tuple[Work, ...]:
    """Without what the host pays."""
    return tuple(w for w in works if not w.kind.endswith(HOST))
