"""Bias gradients of a gated MLP on Hopper: sums in two stages, ``dy_sums.h`` and ``bias_sums.cu``.

The first stage, partial sums in float32, is the product's of ``backward.cu``: of what its epilogue
derives, and by warps that have nothing else to do, of dy. The second is one launch for all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.families.gated.cuda.plans import compiled, launch_of, readable, run
from fastlinear.families.gated.products import Sums
from fastlinear.families.gated.stacking import halves
from fastlinear.kernels.cuda.hopper import WORDS, EarlyLaunch
from fastlinear.kernels.cuda.prepared import Prepared
from fastlinear.native import cuda_driver as driver

_HERE = Path(__file__).parent
_THREADS, _COLUMNS = 512, 64  # of a block of bias_sums.cu
_TASK_COLUMNS = 256  # of dy_sums.h
_MOST_SHARES, _LEAST_SHARE = 128, 16  # of dy; rows of one


def share_of(m: int) -> int:
    """Rows of dy (M, N) that one of its shares adds up."""
    return max(_LEAST_SHARE, -(-m // _MOST_SHARES))


def empty_shares(dy: Tensor) -> Tensor:
    """Memory for the column sums of shares of dy (M, N)."""
    m, n = dy.shape
    return torch.empty((-(-m // share_of(m)), n), dtype=torch.float32, device=dy.device)


def bias_gradients(
    sums: Tensor | None,
    shares: Tensor | None,
    order: str,
    needs: tuple[bool, bool, bool],
    like: Tensor,
) -> Sums:
    """The bias gradients, as the biases lie: of gate and up out of their sums (2, rows, H), of the
    down projection out of its shares (rows, N), behind the launch that left these."""
    first = second = third = None
    parts: tuple[Tensor | None, Tensor | None] = None, None
    if sums is not None and order == "apart":
        first, second = (like.new_empty(sums.shape[2]) if need else None for need in needs[:2])
        parts = first, second
    elif sums is not None:
        first = like.new_empty(2 * sums.shape[2])
        parts = halves(first, None, order, 0)
    if shares is not None:
        third = like.new_empty(shares.shape[1])
    if sums is not None or shares is not None:
        _add_up([sums, *parts, shares, third], like)
    return first, second, third


def column_sums(dy: Tensor) -> Tensor:
    """The down bias's gradient (N,) by itself out of dy (M, N), with the same bits."""
    found = bias_gradients(None, shares_of(dy), "apart", (False, False, True), dy)[2]
    assert found is not None
    return found


def shares_of(dy: Tensor) -> Tensor:
    """The column sums of shares of dy (M, N), in a launch of their own."""
    dy = readable(dy)
    shares = empty_shares(dy)
    key = "shares", dy.dtype, dy.device, dy.shape, dy.stride()
    run(key, lambda: shares_plan([dy, shares]), dy, [dy, shares])
    return shares


def _add_up(tensors: Sequence[Tensor | None], like: Tensor) -> None:
    which = (None if t is None else t.shape for t in tensors)
    key = "sums", like.dtype, like.device, *which
    run(key, lambda: sums_plan(tensors, like), like, tensors)


def sums_plan(tensors: Sequence[Any], like: Tensor) -> Prepared:
    """The launch that finishes bias gradients for tensors laid out as these are: sums (2, rows, H),
    gradients of the gate's and the up projection's bias, shares (rows, N) and the gradient of the
    down projection's, each of them or None. ``like`` has the dtype and the device of gradients."""
    sums, shares = tensors[0], tensors[3]
    rows, size = (0, 0) if sums is None else sums.shape[1:]
    share_rows, n = (0, 0) if shares is None else shares.shape
    slots = [ctypes.c_void_p(0) for _ in tensors]
    counts = (ctypes.c_int(count) for count in (rows, size, share_rows, n))
    kernel = _kernel("gated_bias_sums", like)
    launch = EarlyLaunch(kernel, _THREADS, 1, [*slots, *counts])
    launch.set_grid(2 * -(-size // _COLUMNS) + -(-n // _COLUMNS))
    return launch_of(launch, like, slots)


def shares_plan(tensors: Sequence[Any]) -> Prepared:
    """The launch that adds up shares of dy, for tensors laid out as these are: dy (M, N), readable,
    and its shares."""
    dy, shares = tensors
    m, n = dy.shape
    slots = [ctypes.c_void_p(0) for _ in tensors]
    counts = (ctypes.c_int(count) for count in (m, n, dy.stride(0), share_of(m)))
    kernel = _kernel("gated_dy_sums", dy)
    launch = driver.Launch(kernel, _THREADS, 1, [*slots, *counts])
    tasks = len(shares) * -(-n // _TASK_COLUMNS)
    launch.set_grid(-(-tasks // (_THREADS // 32)))
    return launch_of(launch, dy, slots)


def source(dtype: torch.dtype) -> str:
    """The complete CUDA C++ source of the bias gradients' sums."""
    define = f"#define IS_BF16 {int(dtype == torch.bfloat16)}\n"
    files = WORDS, _HERE / "dy_sums.h", _HERE / "bias_sums.cu"
    return define + "".join(file.read_text() for file in files)


def _kernel(name: str, like: Tensor) -> driver.Kernel:
    key = name, like.dtype, like.device.index
    return compiled(key, name, 0, lambda: source(like.dtype))
