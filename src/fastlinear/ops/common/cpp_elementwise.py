"""``elementwise.cpp`` from Python: passes over float32 tensors on the CPU, on torch's own threads.

All tensors are contiguous unless said otherwise; nothing here checks shapes.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.ops.common import cpp_build
from fastlinear.ops.common.activations import CODES

SOURCE = Path(__file__).with_name("elementwise.cpp")
_CHUNKS = 16  # row chunks with a partial sum each, whatever the number of threads


def reason_not() -> str | None:
    """Why the library cannot be had as far as is known without compiling it, or None."""
    return cpp_build.reason_not() or cpp_build.failed(SOURCE)


@cpp_build.asked_once
def why_not_loaded() -> str | None:
    """Why the library cannot be had, or None; compiles it if this was not tried before."""
    return cpp_build.reason_not() or cpp_build.why_not_loaded(SOURCE)


def activate(name: str, pre: Tensor, out: Tensor) -> None:
    """out = act(pre), of equal shapes; they may be one tensor.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    code = _library().fastlinear_act(
        CODES[name], pre.data_ptr(), out.data_ptr(), pre.numel(), torch.get_num_threads()
    )
    assert code == 0


def activate_with_bias(
    name: str, product: Tensor, bias: Tensor, out: Tensor, pre: Tensor | None
) -> None:
    """pre = product + bias and out = act(pre): (M, N) but for the bias, (N,). ``pre`` is written
    unless None; it and ``out`` may each be the product's memory, but not one memory together.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    m, n = product.shape
    code = _library().fastlinear_act_bias(
        CODES[name],
        product.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        0 if pre is None else pre.data_ptr(),
        m,
        n,
        torch.get_num_threads(),
    )
    assert code == 0


def differentiate(
    name: str, dy: Tensor, saved: Tensor, need_sums: bool
) -> tuple[Tensor, Tensor | None]:
    """(dpre, db): dpre = dy * act'(saved), all (M, N); db its column sums (N,), in float64.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    m, n = dy.shape
    dpre = torch.empty_like(dy)
    db = dy.new_empty(n) if need_sums else None
    partials = dy.new_empty((_CHUNKS, n), dtype=torch.float64) if need_sums else None
    code = _library().fastlinear_dact(
        CODES[name],
        dy.data_ptr(),
        saved.data_ptr(),
        dpre.data_ptr(),
        0 if db is None else db.data_ptr(),
        0 if partials is None else partials.data_ptr(),
        m,
        n,
        _CHUNKS,
        torch.get_num_threads(),
    )
    assert code == 0
    return dpre, db


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(SOURCE)
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.fastlinear_act.argtypes = [number, pointer, pointer, size, number]
    library.fastlinear_act_bias.argtypes = [number, *[pointer] * 4, size, size, number]
    library.fastlinear_dact.argtypes = [number, *[pointer] * 5, size, size, size, number]
    return library
