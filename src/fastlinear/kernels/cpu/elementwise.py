"""``elementwise.cpp`` from Python: passes over float32 tensors on the CPU, on torch's own threads.

All tensors are contiguous unless said otherwise; nothing here checks shapes.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES
from fastlinear.fastpath import recorder
from fastlinear.native import cpp_build

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
    assert not recorder.run(_library().fastlinear_act, CODES[name], pre, out, pre.numel())


def activate_with_bias(
    name: str, product: Tensor, bias: Tensor, out: Tensor, pre: Tensor | None
) -> None:
    """pre = product + bias and out = act(pre): (M, N) but for the bias, (N,). ``pre`` is written
    unless None; it and ``out`` may each be the product's memory, but not one memory together.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    m, n = product.shape
    function = _library().fastlinear_act_bias
    assert not recorder.run(function, CODES[name], product, bias, out, pre, m, n)


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
    given = dy, saved, dpre, db, partials, m, n, _CHUNKS
    assert not recorder.run(_library().fastlinear_dact, CODES[name], *given)
    return dpre, db


def second(name: str, g: Tensor, e: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
    """Of dpre = e act'(saved), for a smooth activation: g times its derivatives by e and by saved.
    All tensors are of one shape.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    by_e, by_saved = torch.empty_like(g), torch.empty_like(g)
    given = g, e, saved, by_e, by_saved, g.numel()
    assert not recorder.run(_library().fastlinear_d2act, CODES[name], *given)
    return by_e, by_saved


def third(
    name: str, a: Tensor, b: Tensor, g: Tensor, e: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of what ``second`` returns, with gradients a and b: the gradients of g, e and saved.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    by_g, by_e, by_saved = (torch.empty_like(g) for _ in range(3))
    given = a, b, g, e, saved, by_g, by_e, by_saved, g.numel()
    assert not recorder.run(_library().fastlinear_d3act, CODES[name], *given)
    return by_g, by_e, by_saved


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(SOURCE)
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.fastlinear_act.argtypes = [number, pointer, pointer, size]
    library.fastlinear_act_bias.argtypes = [number, *[pointer] * 4, size, size]
    library.fastlinear_dact.argtypes = [number, *[pointer] * 5, size, size, size]
    library.fastlinear_d2act.argtypes = [number, *[pointer] * 5, size]
    library.fastlinear_d3act.argtypes = [number, *[pointer] * 8, size]
    return library
