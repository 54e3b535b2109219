"""Products of groups of unequal sizes in one launch of CUDA C++: ``half.cu`` for 16-bit
dtypes, ``single.cu`` for float32.

The groups' pointers and sizes travel among the launch's arguments: nothing is copied to the device
for a call, nothing waits, and weights may move. For sm_80 and later.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.door_launch import DoorLaunch, prepared
from fastlinear.ops.common.door_program import Program
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
from fastlinear.ops.unequal_linear.layout import Backward, Forward

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
_POINTERS, _NUMBERS, _PITCHES = 6, 4, 2  # of a group
_MOST = 2**31 - 1
_MAX_PLANS = 1024

Tensors = Sequence[Tensor]
Call = tuple[int, str, bool]
"""Which product, the activation, whether the pre-activation is kept."""
Pointers = tuple[Sequence[tuple[Any, int] | None] | None, ...]
"""a, saved, b, bias, c and more of every group: an operand and how many bytes behind its first;
None for what is not there."""
Pitches = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Numbers from a row of a, and of b, of every group to the next; None where all are dense."""


def source(
    dtype: torch.dtype,
    mode: int,
    activation: str,
    save_pre: bool,
    tiles: Tiles = SMALL,
    places: int = MAX_GROUPS,
    pitched: bool = False,
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
        "PITCHED": int(pitched),
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
    pitched: bool,
    device: int,
) -> driver.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    text = source(dtype, mode, activation, save_pre, tiles, places, pitched)
    cubin = driver.compile_cubin(text, "unequal_linear.cu", arch)
    shared = 0 if tiles is _SINGLE else tiles.shared_bytes(mode != FORWARD and activation != "none")
    return driver.Kernel(cubin, _KERNEL, shared, device)


def reason_not_on(device: torch.device) -> str | None:
    """Why the kernels cannot run on a CUDA device, or None."""
    capability = device_facts(device).capability
    if capability < (8, 0):
        return f"needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    return None


def reason_not(xs: Tensors, weights: Tensors) -> str | None:
    """Why the kernels cannot serve inputs (..., K) and weights (N, K), or None."""
    x = xs[0]
    if x.device.type != "cuda":
        return "its kernels run on CUDA devices only"
    if x.dtype not in KINDS:
        return f"serves float32, bfloat16 and float16, not {str(x.dtype).removeprefix('torch.')}"
    why = reason_not_on(x.device)
    if why is not None:
        return why
    if max(max(x.numel(), w.numel()) for x, w in zip(xs, weights, strict=True)) > _MOST:
        return "serves matrices of fewer than 2^31 numbers"
    return None


def forward(call: Forward, device: torch.device, tiles: Tiles | None = None) -> None:
    """Compute y and, where it is kept, the pre-activation: one launch for every ``MAX_GROUPS``
    groups. Operands are tensors. float32 accumulation, deterministic.

    Args:
        call: of float32, bfloat16 or float16.
        device: which one.
        tiles: of 16-bit products; None picks ``tiles_of``.
    """
    _run(*_forward(call), call.dtype, device, tiles)


def backward(call: Backward, device: torch.device, tiles: Tiles | None = None) -> None:
    """Compute the gradients: one launch for all dx, one for all dW and db. Operands are tensors.
    Sums over tokens in float32, in a fixed order; exactly 0 for a group without tokens."""
    for product in _backward(call):
        _run(*product, call.dtype, device, tiles)


def forward_steps(p: Program, call: Forward, device: torch.device) -> None:
    """The same as steps of a program; operands are its numbers."""
    _launch_in(p, *_forward(call), call.dtype, device)


def backward_steps(p: Program, call: Backward, device: torch.device) -> None:
    """The same as steps of a program; operands are its numbers."""
    for product in _backward(call):
        _launch_in(p, *product, call.dtype, device)


Product = tuple[Call, Sizes, Pointers, Pitches]
"""(which, (rows, cols, depth) of each group, pointers, pitches)."""


def _forward(call: Forward) -> Product:
    size = call.dtype.itemsize
    ys = [(call.y, size * at) for at in call.offsets]
    pres = None if call.pre is None else [(call.pre, size * at) for at in call.offsets]
    pointers = _begin(call.xs), None, _begin(call.weights), _begin(call.biases), ys, pres
    sizes = tuple([(m, n, k) for m, n, k in call.sizes])
    widths = tuple([k for _, _, k in sizes])
    pitches = _unless_dense((call.x_pitch, widths), (widths, widths))
    return (FORWARD, call.activation, pres is not None), sizes, pointers, pitches


def _unless_dense(pitches: Any, widths: Any) -> Pitches:
    return None if pitches == widths else pitches


def _backward(call: Backward) -> Iterator[Product]:
    size, which = call.dtype.itemsize, range(len(call.sizes))

    def of(places: Sequence[Any] | None, groups: list[int]) -> Any:
        return None if places is None else [places[g] for g in groups]

    def results(buffer: Any, at: Sequence[int | None]) -> Any:
        return [None if i is None else (buffer, size * i) for i in at]

    dys = _begin(call.dys)
    saved = None if call.saved is None else _begin(call.saved)
    if call.pre is not None:
        saved = results(call.pre, call.offsets)
    wanted = [g for g in which if call.dx_at[g] is not None]
    if wanted:
        sizes = tuple([(m, k, n) for m, n, k in of(call.sizes, wanted)])
        lists = dys, saved, _begin(call.weights), None, results(call.dx, call.dx_at), None
        pointers = tuple(of(places, wanted) for places in lists)
        ns, ks = (tuple([size[i] for size in of(call.sizes, wanted)]) for i in (1, 2))
        pitches = _unless_dense((tuple(of(call.dy_pitch, wanted)), ks), (ns, ks))
        yield (GRAD_INPUT, call.activation, False), sizes, pointers, pitches
    wanted = [g for g in which if call.dw_at[g] is not None]
    if wanted:
        sizes = tuple([(n, k, m) for m, n, k in of(call.sizes, wanted)])
        dbs = None if call.db is None else results(call.db, call.db_at)
        lists = dys, saved, _begin(call.xs), None, results(call.dw, call.dw_at), dbs
        pointers = tuple(of(places, wanted) for places in lists)
        widths = tuple(tuple([size[i] for size in of(call.sizes, wanted)]) for i in (1, 2))
        given = tuple(tuple(of(pitch, wanted)) for pitch in (call.dy_pitch, call.x_pitch))
        yield (GRAD_WEIGHT, call.activation, False), sizes, pointers, _unless_dense(given, widths)


def _begin(operands: Sequence[Any]) -> list[tuple[Any, int] | None]:
    return [None if t is None else (t, 0) for t in operands]


# --------------------------------------------------------------------------------------------
# Launches


class _Part:
    """The launch of some of a call's groups, of known sizes, again and again: memory of a
    ``Groups`` of groups.h, into which each call writes its addresses.

    Args:
        kernel: what is launched.
        which: the groups, in order.
        sizes: of all of the call's groups.
        pitches: of all of them, for a kernel that reads them.
        places: how many groups the kernel's arguments have room for.
    """

    def __init__(
        self,
        kernel: driver.Kernel,
        which: list[int],
        sizes: Sizes,
        pitches: Pitches,
        tiles: Tiles,
        places: int,
    ) -> None:
        self._which = which
        count = _NUMBERS + (0 if pitches is None else _PITCHES)
        self._memory = (ctypes.c_uint64 * ((_POINTERS * 8 + count * 4) * places // 8))()
        self._pointers = Struct(f"{len(which)}Q")
        self._offsets = [8 * places * i for i in range(_POINTERS)]
        firsts, total = [], 0
        for g in which:
            firsts.append(total)
            total += tiles.count((sizes[g],))
        numbers = Struct(f"{len(which)}i")
        columns = (*zip(*(sizes[g] for g in which), strict=True), firsts)
        more = [[pitch[g] for g in which] for pitch in pitches or ()]
        for i, column in enumerate((*columns, *more)):
            numbers.pack_into(self._memory, _POINTERS * 8 * places + 4 * places * i, *column)
        arguments = [self._memory, ctypes.c_int(len(which))]
        self._launch = driver.Launch(kernel, tiles.threads, 1, arguments)  # type: ignore[arg-type]
        self._launch.set_grid(total)
        self._lock = threading.Lock()

    def run(self, pointers: Pointers, stream: int) -> None:
        """Launch on tensors of every group of the call."""
        with self._lock:  # the driver copies the arguments before it returns
            for offset, places in zip(self._offsets, pointers, strict=True):
                if places is not None:
                    found = [_address(places[g]) for g in self._which]
                    self._pointers.pack_into(self._memory, offset, *found)
            self._launch.run(stream)

    def in_door(self, pointers: Pointers) -> DoorLaunch:
        """The launch for the door, whose memory is this part's: it must not run elsewhere."""
        places = [
            (ctypes.c_void_p.from_buffer(self._memory, offset + 8 * i), *place)
            for offset, groups in zip(self._offsets, pointers, strict=True)
            if groups is not None
            for i, place in enumerate(groups[g] for g in self._which)
            if place is not None
        ]
        tensors = [(argument, number) for argument, number, _ in places]
        launch = prepared(self._launch, tensors, self)
        return replace(launch, offsets=tuple([skipped for _, _, skipped in places]))


def _parts(
    call: Call,
    dtype: torch.dtype,
    sizes: Sizes,
    pitches: Pitches,
    device: int,
    tiles: Tiles | None,
) -> tuple[_Part, ...]:
    """New launches of such calls."""
    mode, activation, save_pre = call
    if dtype is torch.float32:
        tiles = _SINGLE
    elif tiles is None:
        tiles = tiles_of(sizes, device_facts(torch.device("cuda", device)).units, mode)
    order = largest_first(sizes, mode)
    found = []
    for begin in range(0, len(order), MAX_GROUPS):
        which = order[begin : begin + MAX_GROUPS]
        places = next(n for n in _PLACES if len(which) <= n)
        with torch.cuda.device(device), driver.loading_allowed():
            pitched = pitches is not None
            kernel = _kernel(dtype, mode, activation, save_pre, tiles, places, pitched, device)
        found.append(_Part(kernel, which, sizes, pitches, tiles, places))
    return tuple(found)


@lru_cache(maxsize=_MAX_PLANS)
def _kept_parts(
    call: Call,
    dtype: torch.dtype,
    sizes: Sizes,
    pitches: Pitches,
    device: int,
    given: tuple[bool, ...],
    tiles: Tiles | None,
) -> tuple[_Part, ...]:
    """The launches of such calls; ``given`` says which of the pointers they have: the others stay
    0."""
    return _parts(call, dtype, sizes, pitches, device, tiles)


def _run(
    call: Call,
    sizes: Sizes,
    pointers: Pointers,
    pitches: Pitches,
    dtype: torch.dtype,
    device: torch.device,
    tiles: Tiles | None,
) -> None:
    index = device.index
    driver.make_current(index)
    given = tuple(places is not None for places in pointers)
    stream = torch._C._cuda_getCurrentRawStream(index)
    for part in _kept_parts(call, dtype, sizes, pitches, index, given, tiles):
        part.run(pointers, stream)


def _launch_in(
    p: Program,
    call: Call,
    sizes: Sizes,
    pointers: Pointers,
    pitches: Pitches,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    for part in _parts(call, dtype, sizes, pitches, device.index, None):
        p.launch(part.in_door(pointers), anywhere=True)  # the kernel sees how rows are aligned


def _address(place: tuple[Tensor, int] | None) -> int:
    return 0 if place is None else place[0].data_ptr() + place[1]
