"""``weight_hash.cpp`` from Python: a digest of all bytes of a weight, on torch's own threads."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.ops.common import cpp_build

SOURCE = Path(__file__).with_name("weight_hash.cpp")
Digest = tuple[int, int, int]
_drawn: dict[str, bytes] = {}


def reason_not() -> str | None:
    """Why digests cannot be had as far as is known without compiling, or None."""
    why = cpp_build.reason_not() or cpp_build.failed(SOURCE)
    if why is None:
        return None
    return (
        "a kept copy of a weight is checked at every call by a hash compiled for this processor, "
        f"which cannot be had: {why}; install g++ or name a C++17 compiler in $CXX"
    )


@cpp_build.asked_once
def why_not_loaded() -> str | None:
    """Why digests cannot be had, or None; compiles the library if this was not tried before."""
    return cpp_build.reason_not() or cpp_build.why_not_loaded(SOURCE)


def digest(weight: Tensor) -> Digest:
    """Three 64-bit numbers of all elements of a CPU matrix (N, K), any dtype and strides.

    Equal bytes in equal shape, strides and dtype give equal digests in this process. A change to
    one element always gives another digest; any other change does so but for a chance of about
    2^-64 over the random keys of the process. The memory is read once, where it lies,
    unless neither dimension has unit stride: then it is copied.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    rows, row_bytes, stride, read = _lying(weight)
    found = (ctypes.c_uint64 * 3)()
    if rows and row_bytes:
        library = _library()
        library.fastlinear_weight_hash(
            read.data_ptr(), rows, row_bytes, stride, _keys(), found, torch.get_num_threads()
        )
    return found[0], found[1], found[2]


def _lying(weight: Tensor) -> tuple[int, int, int, Tensor]:
    """(rows, bytes of a row, bytes from row to row, whose memory), a dense matrix as one row."""
    n, k = weight.shape
    across, along = weight.stride()
    width = weight.element_size()
    if weight.is_contiguous() or (across == 1 and along == n):
        return 1, n * k * width, 0, weight
    if along == 1:
        return n, k * width, across * width, weight
    if across == 1:
        return k, n * width, along * width, weight
    return 1, n * k * width, 0, weight.detach().contiguous()


def _keys() -> bytes:
    if not _drawn:  # of threads that come at once, one's keys are everybody's
        _drawn.setdefault("keys", os.urandom(_library().fastlinear_weight_hash_keys_size()))
    return _drawn["keys"]


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(SOURCE)
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.fastlinear_weight_hash_keys_size.restype = size
    library.fastlinear_weight_hash.argtypes = [pointer, *[size] * 3, pointer, pointer, number]
    library.fastlinear_weight_hash.restype = None
    return library
