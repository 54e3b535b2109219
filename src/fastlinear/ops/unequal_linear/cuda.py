"""Products of groups of unequal sizes in one launch of CUDA C++: ``half.cu`` for 16-bit
dtypes, ``single.cu`` for float32.

The groups' pointers and sizes travel among the launch's arguments: nothing is copied to the device
for a call, nothing waits, and weights may move. For sm_80 and later.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.unequal_linear.config import (
    FORWARD,
    GRAD_INPUT,
    GRAD_WEIGHT,
    SMALL,
    Sizes,
    Tiles,
    largest_first,
    tiles_of,
)

MAX_GROUPS = 240
"""Groups of one launch; more take several."""
KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_ACTIVATIONS = (
    *("none", "relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"),
    *("quick_gelu", "leaky_relu"),
)
_HEADERS = ("instructions.h", "groups.h")
_KERNEL = "unequal_linear"
_SINGLE = Tiles(64, 64, (2, 2), 1, 2, 1.0)  # what single.cu is written for
_PLACES = (32, MAX_GROUPS)  # of the groups of a launch: arguments take time to hand over
_POINTERS, _NUMBERS = 6, 4  # of a group
_ALIGN = 16  # bytes at which each result begins
_MOST = 2**31 - 1
_MAX_PLANS = 1024

Tensors = Sequence[Tensor]


def source(
    dtype: torch.dtype,
    mode: int,
    activation: str,
    save_pre: bool,
    tiles: Tiles = SMALL,
    places: int = MAX_GROUPS,
    *,
    headers: Sequence[str] = _HEADERS,
) -> str:
    """The complete CUDA C++ source of one specialisation; ``headers`` lie beside this file."""
    wide = dtype is torch.float32
    tiles = _SINGLE if wide else tiles
    macros = {
        "MODE": mode,
        "KIND": KINDS[dtype],
        "ACT": _ACTIVATIONS.index(activation),
        "SAVE_PRE": int(save_pre),
        "GROUPS": places,
        "TILE_M": tiles.rows,
        "TILE_N": tiles.cols,
        "WARPS_M": tiles.warps[0],
        "WARPS_N": tiles.warps[1],
        "STAGES": tiles.stages,
        "BLOCKS": tiles.blocks,
    }
    files = (*headers, "single.cu" if wide else "half.cu")
    here = Path(__file__).parent
    text = "".join((here / name).read_text() for name in files)
    return "".join(f"#define {name} {v}\n" for name, v in macros.items()) + text


@cache
def _kernel(
    dtype: torch.dtype,
    mode: int,
    activation: str,
    save_pre: bool,
    tiles: Tiles,
    places: int,
    device: int,
) -> driver.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    text = source(dtype, mode, activation, save_pre, tiles, places)
    cubin = driver.compile_cubin(text, "unequal_linear.cu", arch)
    shared = 0 if tiles is _SINGLE else tiles.shared_bytes(mode != FORWARD and activation != "none")
    return driver.Kernel(cubin, _KERNEL, shared, device)


def reason_not(xs: Tensors, weights: Tensors) -> str | None:
    """Why the kernels cannot serve inputs (..., K) and weights (N, K), or None."""
    x = xs[0]
    if x.device.type != "cuda":
        return "its kernels run on CUDA devices only"
    if x.dtype not in KINDS:
        return f"serves float32, bfloat16 and float16, not {str(x.dtype).removeprefix('torch.')}"
    capability = device_facts(x.device).capability
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
    *,
    tiles: Tiles | None = None,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """y_g = act(x_g W_gᵀ + b_g) for all groups: one launch for every ``MAX_GROUPS`` of them.

    Args:
        xs: (M_g, K_g) each, contiguous; float32, bfloat16 or float16, all of one dtype and device.
        weights: (N_g, K_g) each, contiguous.
        biases: (N_g,) contiguous, or None.
        activation: name of the activation.
        save_pre: also return the pre-activations.
        tiles: of 16-bit products; None picks ``tiles_of``.

    Returns:
        The y_g (M_g, N_g), which share one buffer, and the pre-activations likewise, or None.
        float32 accumulation, deterministic.
    """
    sizes = tuple((x.shape[0], w.shape[0], x.shape[1]) for x, w in zip(xs, weights, strict=True))
    shapes = tuple((m, n) for m, n, _ in sizes)
    ys = _buffers(shapes, xs[0])
    pres = _buffers(shapes, xs[0]) if save_pre else None
    pointers = (xs, None, weights, biases, ys, pres)
    _run((FORWARD, activation, save_pre), xs[0], sizes, pointers, tiles)
    return ys, pres


def grad_inputs(
    dys: Tensors,
    saved: Tensors | None,
    weights: Tensors,
    activation: str,
    *,
    tiles: Tiles | None = None,
) -> list[Tensor]:
    """dx_g = (dy_g · act'(pre_g)) W_g in one launch; ``saved`` as the activation's derivative takes
    it. All contiguous; returns (M_g, K_g) each, in one buffer."""
    sizes = tuple((dy.shape[0], w.shape[1], w.shape[0]) for dy, w in zip(dys, weights, strict=True))
    dxs = _buffers(tuple((m, k) for m, k, _ in sizes), dys[0])
    pointers = (dys, saved, weights, None, dxs, None)
    _run((GRAD_INPUT, activation, False), dys[0], sizes, pointers, tiles)
    return dxs


def grad_weights(
    dys: Tensors,
    saved: Tensors | None,
    xs: Tensors,
    activation: str,
    with_bias: Sequence[bool],
    *,
    tiles: Tiles | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(dW_g, db_g) in one launch: (N_g, K_g) and, where ``with_bias``, (N_g,). Sums over tokens in
    float32, in a fixed order; exactly 0 for a group without tokens."""
    sizes = tuple((dy.shape[1], x.shape[1], dy.shape[0]) for dy, x in zip(dys, xs, strict=True))
    dws = _buffers(tuple((n, k) for n, k, _ in sizes), dys[0])
    dbs: list[Tensor | None] = [None] * len(sizes)
    if any(with_bias):
        sums = _buffers(tuple((n,) for n, _, _ in sizes), dys[0])
        dbs = [db if wanted else None for db, wanted in zip(sums, with_bias, strict=True)]
    pointers = (dys, saved, xs, None, dws, dbs)
    _run((GRAD_WEIGHT, activation, False), dys[0], sizes, pointers, tiles)
    return dws, dbs


# --------------------------------------------------------------------------------------------
# Launches


class _Part:
    """The launch of some of a call's groups, of known sizes, again and again: memory of a
    ``Groups`` of groups.h, into which each call writes its addresses.

    Args:
        kernel: what is launched.
        which: the groups, in order.
        sizes: of all of the call's groups.
        places: how many groups the kernel's arguments have room for.
    """

    def __init__(
        self, kernel: driver.Kernel, which: list[int], sizes: Sizes, tiles: Tiles, places: int
    ) -> None:
        self._which = which
        self._memory = (ctypes.c_uint64 * ((_POINTERS * 8 + _NUMBERS * 4) * places // 8))()
        self._pointers = Struct(f"{len(which)}Q")
        self._offsets = [8 * places * i for i in range(_POINTERS)]
        firsts, total = [], 0
        for g in which:
            firsts.append(total)
            total += tiles.count((sizes[g],))
        numbers = Struct(f"{len(which)}i")
        columns = (*zip(*(sizes[g] for g in which), strict=True), firsts)
        for i, column in enumerate(columns):
            numbers.pack_into(self._memory, _POINTERS * 8 * places + 4 * places * i, *column)
        arguments = [self._memory, ctypes.c_int(len(which))]
        self._launch = driver.Launch(kernel, tiles.threads, 1, arguments)  # type: ignore[arg-type]
        self._launch.set_grid(total)
        self._lock = threading.Lock()

    def run(self, pointers: Sequence[Sequence[Tensor | None] | None], stream: int) -> None:
        """Launch on a, saved, b, bias, c and more of every group of the call."""
        with self._lock:  # the driver copies the arguments before it returns
            for offset, tensors in zip(self._offsets, pointers, strict=True):
                if tensors is not None:
                    found = [_address(tensors[g]) for g in self._which]
                    self._pointers.pack_into(self._memory, offset, *found)
            self._launch.run(stream)


@lru_cache(maxsize=_MAX_PLANS)
def _parts(
    call: tuple[int, str, bool],
    dtype: torch.dtype,
    sizes: Sizes,
    device: int,
    given: tuple[bool, ...],
    tiles: Tiles | None,
) -> tuple[_Part, ...]:
    """The launches of such calls; ``given`` says which of the pointers they have: the others stay
    0."""
    mode, activation, save_pre = call
    if dtype is torch.float32:
        tiles = _SINGLE
    elif tiles is None:
        tiles = tiles_of(sizes, device_facts(torch.device("cuda", device)).units, mode)
    order = largest_first(sizes)
    found = []
    for begin in range(0, len(order), MAX_GROUPS):
        which = order[begin : begin + MAX_GROUPS]
        places = next(n for n in _PLACES if len(which) <= n)
        with torch.cuda.device(device), driver.loading_allowed():
            kernel = _kernel(dtype, mode, activation, save_pre, tiles, places, device)
        found.append(_Part(kernel, which, sizes, tiles, places))
    return tuple(found)


def _run(
    call: tuple[int, str, bool],
    like: Tensor,
    sizes: Sizes,
    pointers: tuple[Sequence[Tensor | None] | None, ...],
    tiles: Tiles | None,
) -> None:
    """Launch on (a, saved, b, bias, c, more) of every group, sizes (rows, cols, depth)."""
    index = like.device.index
    assert index is not None
    driver.make_current(index)
    given = tuple(tensors is not None for tensors in pointers)
    stream = torch._C._cuda_getCurrentRawStream(index)
    for part in _parts(call, like.dtype, sizes, index, given, tiles):
        part.run(pointers, stream)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _buffers(shapes: tuple[tuple[int, ...], ...], like: Tensor) -> list[Tensor]:
    """Uninitialised tensors of those shapes in one allocation, each at 16 bytes."""
    total, places = _places(shapes, like.element_size())
    flat = torch.empty(total, dtype=like.dtype, device=like.device)
    return [flat.as_strided(*place) for place in places]


@lru_cache(maxsize=_MAX_PLANS)
def _places(
    shapes: tuple[tuple[int, ...], ...], itemsize: int
) -> tuple[int, list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """(numbers of all, shape, strides and beginning of each)."""
    unit = _ALIGN // itemsize
    total = 0
    found: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    for shape in shapes:
        found.append((shape, (shape[1], 1) if len(shape) == 2 else (1,), total))
        total += -(-math.prod(shape) // unit) * unit
    return total, found
