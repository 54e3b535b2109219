"""The measured limits a row is held against: a device's ceilings, and a CPU's caches."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from fastlinear.core.cost import Ceilings, measure_ceilings
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.timing import interleave

_LARGEST = 1 << 26
_SMALLEST_CPU, _SMALLEST_CUDA = 1 << 14, 1 << 22


_Key = tuple[str, str, str, int, bool]
_again: dict[_Key, Ceilings] = {}
"""What was measured a second time; a process does so once for each size of work."""


def ceilings_for(
    device: torch.device, dtype: str, working_set: float, cold: bool = False
) -> Ceilings:
    """Matrix-product rate and bandwidth for work that touches ``working_set`` bytes.

    With cold caches these are the device's. Otherwise data stay in the caches between calls, so
    the bandwidth is the best of copies and reads at the working set's size and above.
    """
    first = _measured(device, dtype, working_set, cold, fresh=False)
    second = _again.get(_key(device, dtype, working_set, cold))
    return first if second is None else _better(first, second)


def measured_again(
    known: Ceilings, device: torch.device, dtype: str, working_set: float, cold: bool = False
) -> Ceilings:
    """The better of ``known`` and a second measurement, for when a time beats the ceilings.

    A ceiling measured while something else ran is too low; a wrong cost stays above any ceiling,
    so that there is no third measurement for work of that size.
    """
    key = _key(device, dtype, working_set, cold)
    if key not in _again:
        _again[key] = _measured(device, dtype, working_set, cold, fresh=True)
    return _better(known, _again[key])


def _better(one: Ceilings, other: Ceilings) -> Ceilings:
    return Ceilings(
        max(one.flops_per_s, other.flops_per_s), max(one.bytes_per_s, other.bytes_per_s)
    )


def _key(device: torch.device, dtype: str, working_set: float, cold: bool) -> _Key:
    return str(device), dtype, _label(device, dtype), _size(device, working_set), cold


def _label(device: torch.device, dtype: str) -> str:
    """Precision and threads; the thread count is not part of the device's name."""
    precision = matmul_precision(FLOAT_DTYPES[dtype])
    return precision if device.type == "cuda" else f"{precision}, {torch.get_num_threads()} threads"


def _size(device: torch.device, working_set: float) -> int:
    """The largest power of two that is no larger: more might not fit where the work does."""
    size = _SMALLEST_CUDA if device.type == "cuda" else _SMALLEST_CPU
    while 2 * size <= min(working_set, _LARGEST):
        size *= 2
    return size


def _measured(
    device: torch.device, dtype: str, working_set: float, cold: bool, *, fresh: bool
) -> Ceilings:
    """The ceilings, each measured once a process, or all of them now."""
    whole, warm_at = measure_ceilings, _warm_bandwidth
    if fresh:
        whole, warm_at = whole.__wrapped__, warm_at.__wrapped__  # type: ignore[assignment]
    limits = whole(str(device), dtype, _label(device, dtype))
    if device.type == "cuda" and cold:
        return limits
    threads = 0 if device.type == "cuda" else torch.get_num_threads()
    warm, size = 0.0, _size(device, working_set)
    while size <= _LARGEST:
        warm = max(warm, warm_at(size, str(device), threads))
        size *= 2
    return Ceilings(limits.flops_per_s, max(limits.bytes_per_s, warm))


@lru_cache(maxsize=64)
def _warm_bandwidth(size: int, device: str, threads: int) -> float:
    """Bytes per second of a warm copy or read of ``size`` bytes, whichever is faster."""
    half = torch.ones(max(1, size // 8), device=device)
    other = torch.empty_like(half)
    matrix = torch.ones(max(1, size // 4 // 256), 256, device=device)
    vector = torch.ones(256, device=device)
    width = max(1, math.isqrt(size // 4))
    weight = torch.ones(width, width, device=device)
    rows = torch.ones(4, width, device=device)
    arms = {
        "copy": lambda: other.copy_(half),
        "sum": lambda: matrix.sum(),
        "mv": lambda: torch.mv(matrix, vector),
        "mm": lambda: torch.mm(rows, weight.t()),
    }
    with torch.no_grad():
        samples = interleave(arms, device=device, metric="device", rounds=5)
    return size / min(min(s.us) for s in samples.values()) * 1e6
