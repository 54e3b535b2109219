"""Products of groups of unequal sizes in one launch of CUDA C++: ``unequal.cu``.

The groups' pointers and sizes travel among the launch's arguments: nothing is copied to the device
for a call, nothing waits, and weights may move. For sm_80 and later.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.activations import activation as activation_of

MAX_GROUPS = 240
"""Groups of one launch; more take several."""
KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
FORWARD, GRAD_INPUT, GRAD_WEIGHT = 0, 1, 2
_ACTIVATIONS = (
    *("none", "relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"),
    *("quick_gelu", "leaky_relu"),
)
_SOURCE = Path(__file__).with_name("unequal.cu")
_KERNEL = "grouped_linear_unequal"
_THREADS = 128
_TILE = 64
_ALIGN = 16  # bytes at which each result begins
_MOST = 2**31 - 1

Tensors = Sequence[Tensor]


class _Group(ctypes.Structure):
    """``Group`` of unequal.cu."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("a", "saved", "b", "bias", "c", "more")),
        *((name, ctypes.c_int32) for name in ("rows", "cols", "depth", "first")),
    ]


def source(dtype: torch.dtype, mode: int, activation: str, save_pre: bool) -> str:
    """The complete CUDA C++ source of one specialisation."""
    macros = {
        "MODE": mode,
        "KIND": KINDS[dtype],
        "ACT": _ACTIVATIONS.index(activation),
        "SAVE_PRE": int(save_pre),
        "GROUPS": MAX_GROUPS,
    }
    return "".join(f"#define {name} {v}\n" for name, v in macros.items()) + _SOURCE.read_text()


@cache
def _kernel(
    dtype: torch.dtype, mode: int, activation: str, save_pre: bool, device: int
) -> driver.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    cubin = driver.compile_cubin(source(dtype, mode, activation, save_pre), "unequal.cu", arch)
    return driver.Kernel(cubin, _KERNEL, 0, device)


def reason_not(xs: Tensors, weights: Tensors) -> str | None:
    """Why the kernels cannot serve inputs (..., K) and weights (N, K), or None."""
    x = xs[0]
    if x.device.type != "cuda":
        return "its kernels run on CUDA devices only"
    if x.dtype not in KINDS:
        return f"serves float32, bfloat16 and float16, not {str(x.dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(x.device)
    if capability < (8, 0):
        return f"needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    if max(max(x.numel(), w.numel()) for x, w in zip(xs, weights, strict=True)) > _MOST:
        return "serves matrices of fewer than 2^31 numbers"
    return None


def forward(
    xs: Tensors,
    weights: Tensors,
    biases: Sequence[Tensor | None],
    activation: str,
    save_pre: bool,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """y_g = act(x_g W_gᵀ + b_g) for all groups: one launch for every ``MAX_GROUPS`` of them.

    Args:
        xs: (M_g, K_g) each, contiguous; float32, bfloat16 or float16, all of one dtype and device.
        weights: (N_g, K_g) each, contiguous.
        biases: (N_g,) contiguous, or None.
        activation: name of the activation.
        save_pre: also return the pre-activations.

    Returns:
        The y_g (M_g, N_g), which share one buffer, and the pre-activations likewise, or None.
        float32 accumulation, deterministic.
    """
    sizes = [(x.shape[0], w.shape[0], x.shape[1]) for x, w in zip(xs, weights, strict=True)]
    shapes = [(m, n) for m, n, _ in sizes]
    ys = _buffers(shapes, xs[0])
    pres = _buffers(shapes, xs[0]) if save_pre else None
    pointers = zip(
        *(_addresses(xs), _none(sizes), _addresses(weights)),
        *(_addresses(biases), _addresses(ys), _none(sizes) if pres is None else _addresses(pres)),
        strict=True,
    )
    _run(FORWARD, xs[0], activation, save_pre, list(pointers), sizes)
    return ys, pres


def grad_inputs(
    dys: Tensors, saved: Tensors | None, weights: Tensors, activation: str
) -> list[Tensor]:
    """dx_g = (dy_g · act'(pre_g)) W_g in one launch; ``saved`` as the activation's derivative takes
    it. All contiguous; returns (M_g, K_g) each, in one buffer."""
    sizes = [(dy.shape[0], w.shape[1], w.shape[0]) for dy, w in zip(dys, weights, strict=True)]
    dxs = _buffers([(m, k) for m, k, _ in sizes], dys[0])
    kept = _none(sizes) if saved is None else _addresses(saved)
    pointers = zip(
        *(_addresses(dys), kept, _addresses(weights), _none(sizes), _addresses(dxs), _none(sizes)),
        strict=True,
    )
    _run(GRAD_INPUT, dys[0], activation, False, list(pointers), sizes)
    return dxs


def grad_weights(
    dys: Tensors, saved: Tensors | None, xs: Tensors, activation: str, with_bias: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(dW_g, db_g) in one launch: (N_g, K_g) and, where ``with_bias``, (N_g,). Sums over tokens in
    float32, in a fixed order; exactly 0 for a group without tokens."""
    sizes = [(dy.shape[1], x.shape[1], dy.shape[0]) for dy, x in zip(dys, xs, strict=True)]
    dws = _buffers([(n, k) for n, k, _ in sizes], dys[0])
    sums = _buffers([(n,) for n, _, _ in sizes], dys[0])
    dbs = [db if wanted else None for db, wanted in zip(sums, with_bias, strict=True)]
    kept = _none(sizes) if saved is None else _addresses(saved)
    pointers = zip(
        *(_addresses(dys), kept, _addresses(xs), _none(sizes), _addresses(dws), _addresses(dbs)),
        strict=True,
    )
    _run(GRAD_WEIGHT, dys[0], activation, False, list(pointers), sizes)
    return dws, dbs


def _run(
    mode: int,
    like: Tensor,
    activation: str,
    save_pre: bool,
    pointers: list[tuple[int, ...]],
    sizes: list[tuple[int, int, int]],
) -> None:
    """Launch on (a, saved, b, bias, c, more) of every group, sizes (rows, cols, depth)."""
    activation_of(activation)
    index = like.device.index
    assert index is not None
    driver.make_current(index)
    with torch.cuda.device(index), driver.loading_allowed():
        kernel = _kernel(like.dtype, mode, activation, save_pre, index)
    stream = torch._C._cuda_getCurrentRawStream(index)
    for begin in range(0, len(sizes), MAX_GROUPS):
        groups, count, first = (_Group * MAX_GROUPS)(), 0, 0
        part = slice(begin, begin + MAX_GROUPS)
        for found, (rows, cols, depth) in zip(pointers[part], sizes[part], strict=True):
            tiles = -(-rows // _TILE) * -(-cols // _TILE)
            if tiles:
                groups[count] = _Group(*found, rows, cols, depth, first)
                count, first = count + 1, first + tiles
        if count:
            arguments: list[Any] = [groups, ctypes.c_int(count)]
            launch = driver.Launch(kernel, _THREADS, 1, arguments)
            launch.set_grid(first)
            launch.run(stream)


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _none(like: Sequence[Any]) -> list[int]:
    return [0] * len(like)


def _buffers(shapes: Sequence[tuple[int, ...]], like: Tensor) -> list[Tensor]:
    """Uninitialised tensors of those shapes in one allocation, each at 16 bytes."""
    unit = _ALIGN // like.element_size()
    total, places = 0, []
    for shape in shapes:
        places.append(total)
        total += -(-math.prod(shape) // unit) * unit
    flat = torch.empty(total, dtype=like.dtype, device=like.device)
    return [
        flat.as_strided(shape, (shape[1], 1) if len(shape) == 2 else (1,), place)
        for shape, place in zip(shapes, places, strict=True)
    ]
