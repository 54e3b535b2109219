"""The measured limits a row is held against: a device's ceilings, and a CPU's caches."""

from __future__ import annotations

from functools import lru_cache

import torch

from fastlinear.core.cost import Ceilings, measure_ceilings
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.timing import interleave

_LARGEST = 1 << 26
_SMALLEST_CPU, _SMALLEST_CUDA = 1 << 14, 1 << 22


def ceilings_for(
    device: torch.device, dtype: str, working_set: float, cold: bool = False
) -> Ceilings:
    """Matrix-product rate and bandwidth for work that touches ``working_set`` bytes.

    With cold caches these are the device's. Otherwise data stay in the caches between calls, so
    the bandwidth is the best of copies and reads at the working set's size and above.
    """
    precision = matmul_precision(FLOAT_DTYPES[dtype])
    if device.type == "cuda" and cold:
        return measure_ceilings(str(device), dtype, precision)
    # the thread count is not part of the device's name
    threads = 0 if device.type == "cuda" else torch.get_num_threads()
    label = f"{precision}, {threads} threads" if threads else precision
    limits = measure_ceilings(str(device), dtype, label)
    size = _SMALLEST_CUDA if device.type == "cuda" else _SMALLEST_CPU
    while size < min(working_set, _LARGEST):
        size *= 4
    warm = 0.0
    while size <= _LARGEST:
        warm = max(warm, _warm_bandwidth(size, str(device), threads))
        size *= 4
    return Ceilings(limits.flops_per_s, max(limits.bytes_per_s, warm))


def measured_again(
    known: Ceilings, device: torch.device, dtype: str, working_set: float, cold: bool = False
) -> Ceilings:
    """The better of ``known`` and a fresh measurement, for when a time beats the ceilings.

    A ceiling measured while something else ran is too low; a wrong cost stays above any ceiling.
    """
    measure_ceilings.cache_clear()
    _warm_bandwidth.cache_clear()
    fresh = ceilings_for(device, dtype, working_set, cold)
    return Ceilings(
        max(known.flops_per_s, fresh.flops_per_s), max(known.bytes_per_s, fresh.bytes_per_s)
    )


@lru_cache(maxsize=64)
def _warm_bandwidth(size: int, device: str, threads: int) -> float:
    """Bytes per second of a warm copy or read of ``size`` bytes, whichever is faster."""
    half = torch.ones(max(1, size // 8), device=device)
    other = torch.empty_like(half)
    matrix = torch.ones(max(1, size // 4 // 256), 256, device=device)
    vector = torch.ones(256, device=device)
    arms = {
        "copy": lambda: other.copy_(half),
        "sum": lambda: matrix.sum(),
        "mv": lambda: torch.mv(matrix, vector),
    }
    with torch.no_grad():
        samples = interleave(arms, device=device, metric="device", rounds=5)
    return size / min(min(s.us) for s in samples.values()) * 1e6
