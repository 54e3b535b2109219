"""Kernels in CUDA C++ for Hopper, compiled and loaded once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch

from fastlinear.kernels.cuda.hopper import ARCH
from fastlinear.native import cuda_driver as driver

_kernels: dict[tuple[str, str, int, int], driver.Kernel] = {}


def kernel(text: str, name: str, shared: int, device: int) -> driver.Kernel:
    """The kernel of that name of a source, also while a graph is recorded.

    Args:
        text: complete CUDA C++.
        name: of the kernel.
        shared: bytes of dynamic shared memory.
        device: its ordinal.
    """
    key = text, name, shared, device
    found = _kernels.get(key)
    if found is None:
        with driver.loading_allowed():
            driver.make_current(device)
            found = _kernels[key] = driver.Kernel(_cubin(text), name, shared, device)
    return found


@cache
def _cubin(text: str) -> bytes:
    return driver.compile_cubin(text, "fastlinear.cu", ARCH)


def current(device: int | None) -> AbstractContextManager[object]:
    """That device as PyTorch's current one, of which occupancy is asked; None: it stays."""
    return torch.cuda.device(-1 if device is None else device)
