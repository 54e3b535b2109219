"""``gate.cpp`` from Python: the gate's passes on the CPU, on torch's own threads.

Float32 and bfloat16, computed in float32. Nothing here checks shapes.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES
from fastlinear.families.gated.stacking import Pre, empty_like, halves, split_pre
from fastlinear.fastpath import recorder
from fastlinear.kernels.cpu import allocator
from fastlinear.native import cpp_build

SOURCE = Path(__file__).with_name("gate.cpp")
_CHUNKS = 16  # of rows, each with sums of its own, whatever the number of threads


def reason_not() -> str | None:
    """Why the library cannot be had as far as is known without compiling it, or None."""
    return cpp_build.reason_not() or cpp_build.failed(SOURCE)


def forward(pre: Pre, activation: str, order: str, over: bool = False) -> Tensor:
    """h (M, H) = act(gate) ∘ up, dense.

    Args:
        pre: pre-activations, each tensor dense.
        activation, order: their names.
        over: whether h may take the memory of pre.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    gate, up = split_pre(pre, order)
    h = gate if over and order == "apart" else allocator.empty(gate.shape, gate.dtype)
    if not gate.numel():
        return h
    kind = CODES[activation], int(gate.dtype is torch.bfloat16)
    given = gate, up, h, *gate.shape, *_strides(pre, order)
    assert not recorder.run(_library().fastlinear_gate_forward, *kind, *given)
    return h


def backward(
    dh: Tensor,
    pre: Pre,
    activation: str,
    order: str,
    needs: tuple[bool, bool],
    in_place: bool,
    over: bool = False,
) -> tuple[Pre, Tensor, tuple[Tensor | None, Tensor | None]]:
    """(dpre laid out as pre, h (M, H), bias gradients); sums in float64, in a fixed order.

    Args:
        dh: the gradient of h, (M, H), dense.
        pre: pre-activations, each tensor dense.
        activation, order: their names.
        needs: which bias gradients are wanted: the gate's (or the stack's, (2H,)) and the up
            projection's.
        in_place: whether h may take the memory of dh.
        over: whether dpre may take the memory of pre.

    Raises:
        UnsupportedError: the library cannot be compiled or loaded.
    """
    gate, up = split_pre(pre, order)
    dpre = pre if over else empty_like(pre)
    h = dh if in_place else allocator.empty(dh.shape, dh.dtype)
    sums = tuple(
        torch.empty(t.shape[1], dtype=t.dtype, device=t.device) if need and t is not None else None
        for t, need in zip(pre, needs, strict=True)
    )
    if not dh.numel():
        return dpre, h, tuple(None if s is None else s.zero_() for s in sums)  # type: ignore[return-value]
    dgate, dup = split_pre(dpre, order)
    sum_gate, sum_up = sums
    if order != "apart" and sum_gate is not None:
        sum_gate, sum_up = halves(sum_gate, None, order, 0)
    kind = CODES[activation], int(dh.dtype is torch.bfloat16)
    tensors = dh, gate, up, dgate, dup, h, sum_gate, sum_up
    numbers = *gate.shape, *_strides(pre, order), _CHUNKS
    assert not recorder.run(_library().fastlinear_gate_backward, *kind, *tensors, *numbers)
    return dpre, h, sums  # type: ignore[return-value]


def _strides(pre: Pre, order: str) -> tuple[int, int]:
    """(row, column) stride of the halves of dense pre-activations."""
    return pre[0].shape[1], 2 if order == "interleaved" else 1


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = cpp_build.load(SOURCE)
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    flags = [number, number]
    library.fastlinear_gate_forward.argtypes = [*flags, *[pointer] * 3, *[size] * 4]
    library.fastlinear_gate_backward.argtypes = [*flags, *[pointer] * 8, *[size] * 5]
    return library
