"""``gemm.cpp`` from Python: float32 products on the CPU. Nothing here checks shapes."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from fastlinear.fastpath import recorder
from fastlinear.native import cpp_build

SOURCE = Path(__file__).with_name("gemm.cpp")


def reason_not() -> str | None:
    """Why the library cannot be had as far as is known without compiling it, or None."""
    return cpp_build.reason_not() or cpp_build.failed(SOURCE)


@cpp_build.asked_once
def why_not_loaded() -> str | None:
    """Why the library cannot be had, or None; compiles it if this was not tried before."""
    return cpp_build.reason_not() or cpp_build.why_not_loaded(SOURCE)


def readable(matrix: Tensor) -> bool:
    """Whether the library reads a matrix as it lies: one stride is 1, the other no overlap."""
    (rows, columns), (across, along) = matrix.shape, matrix.stride()
    return (along == 1 and across >= columns) or (across == 1 and along >= rows)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) b (K, N) → (M, N), contiguous; both are ``readable``. The same bits whatever the
    number of threads.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    (m, k), n = a.shape, b.shape[1]
    if not (m and n and k):
        return a.new_zeros(m, n)
    c = a.new_empty(m, n)
    function = _library().fastlinear_gemm
    recorder.run(function, a, *a.stride(), b, *b.stride(), c, n, m, n, k)
    return c


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(SOURCE)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    matrix: list[Any] = [pointer, size, size]
    library.fastlinear_gemm.argtypes = [*matrix, *matrix, pointer, *[size] * 4]
    library.fastlinear_gemm.restype = None
    return library
