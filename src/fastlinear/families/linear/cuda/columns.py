"""db of many rows where dpre is dy, in one launch of CUDA C++ for Hopper: ``columns.cu``.

What the Triton pass and its second kernel do, without the second: the blocks that share columns are
a cluster and add up what each of them summed. With a derivative to form, the Triton pass is faster.
"""

from __future__ import annotations

import ctypes
from functools import cache
from math import hypot
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.kernels.cuda.hopper import WORDS
from fastlinear.kernels.cuda.prepared import Prepared
from fastlinear.native import cuda_driver as driver

ARCH = "sm_90a"
MIN_ROWS = 2048
_UNITS = 132  # multiprocessors of a Hopper
_BYTES_PER_US, _BLOCK_BYTES_PER_US = 3.5e6, 9e4  # of the device; that a block has come at most
_START_US, _TRITON_START_US = 2.5, 5.0  # of one launch, and of a pass and its second kernel
_TRITON_SHARE = 0.8  # of the device's bytes
_SOURCE = Path(__file__).with_name("columns.cu")
_KERNEL = "linear_act_columns"
_CLUSTER = 8
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_STRIDE = 1 << 31

Shape = tuple[int, int, int]
"""Columns of a cluster, threads of a block, rows a thread has under way."""


def shape_for(N: int) -> Shape:
    """The kernel's shape for N columns: narrow clusters where there would be too few, of large
    blocks where each has a multiprocessor to itself."""
    if N > 2048:
        return 128, 512, 8
    return (64, 1024, 4) if _blocks(N, 64) <= _UNITS else (64, 512, 8)


def _blocks(n: int, columns: int) -> int:
    return -(-n // columns) * _CLUSTER


def pays(m: int, n: int) -> bool:
    """Whether (M, N) in 16 bits takes less than by Triton, whose programs share any rows out: here
    few columns leave multiprocessors idle."""
    shape, moved = shape_for(n), 2 * m * n
    busy = min(_blocks(n, shape[0]), _UNITS) * min(1.0, n / shape[0])
    us = _START_US + hypot(moved / _BYTES_PER_US, moved / (busy * _BLOCK_BYTES_PER_US))
    return us < _TRITON_START_US + moved / (_TRITON_SHARE * _BYTES_PER_US)


def serves(dy: Tensor) -> bool:
    """Whether this kernel takes such a tensor: 16-bit on Hopper, many rows, aligned to 16 bytes,
    sooner than Triton's would be done."""
    if not dy.is_cuda or dy.shape[0] < MIN_ROWS or dy.dtype not in _DTYPES:
        return False
    capability = torch.cuda.get_device_capability(dy.device)
    if not serves_size(dy.shape[0], dy.shape[1], dy.dtype, capability):
        return False
    dense = dy.stride(1) == 1 and dy.shape[1] <= dy.stride(0) < _MAX_STRIDE
    return dense and dy.stride(0) % 8 == 0 and dy.data_ptr() % 16 == 0


def serves_size(m: int, n: int, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether it takes (M, N) where rows lie well."""
    able = dtype in _DTYPES and m >= MIN_ROWS and n and n % 8 == 0 and capability == (9, 0)
    return bool(able) and pays(m, n)


def source(dtype: torch.dtype, shape: Shape) -> str:
    """The complete CUDA C++ source of one specialisation."""
    columns, threads, unroll = shape
    macros = {
        "COLS": columns,
        "CL": _CLUSTER,
        "THREADS": threads,
        "UNROLL": unroll,
        "IS_BF16": int(dtype == torch.bfloat16),
    }
    defines = "".join(f"#define {k} {v}\n" for k, v in macros.items())
    return defines + WORDS.read_text() + _SOURCE.read_text()


@cache
def _kernel(dtype: torch.dtype, shape: Shape, device: int) -> driver.Kernel:
    cubin = driver.compile_cubin(source(dtype, shape), "columns.cu", ARCH)
    return driver.Kernel(cubin, _KERNEL, 0, device)


class ColumnSums:
    """One prepared launch: dy of one shape, strides and dtype, at any address.

    Args:
        dy: (M, N) that :func:`serves` accepts.
        shape: the kernel's shape; chosen by :func:`shape_for` when None.
    """

    def __init__(self, dy: Tensor, shape: Shape | None = None) -> None:
        M, N = dy.shape
        shape = shape or shape_for(N)
        driver.make_current(dy.device.index)
        with driver.loading_allowed():
            kernel = _kernel(dy.dtype, shape, dy.device.index)
        places = [ctypes.c_void_p(0) for _ in "yb"]
        numbers = [ctypes.c_int(v) for v in (M, N, dy.stride(0))]
        launch = driver.Launch(kernel, shape[1], _CLUSTER, [*places, *numbers])
        launch.set_grid(-(-N // shape[0]) * _CLUSTER)
        self._launch = Prepared(launch, dy.device.index, [(p, i) for i, p in enumerate(places)])

    def run(self, dy: Tensor, saved: Tensor | None, dpre: Tensor | None, db: Tensor | None) -> None:
        """Launch; db (N,) is contiguous, saved and dpre are None: as grad_pre's other plans."""
        self._launch(dy, db)
