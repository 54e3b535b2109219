"""Backward of many narrow groups on Hopper, in CUDA C++: ``strips_backward.cu``.

One pass over dy, what the forward saved, and x: dx leaves at once, dW and db stay in registers over
a block's tiles of tokens and leave as float32 shares, which a second launch adds up in order.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.reference import Gradients, Needs

ARCH = "sm_90a"
KERNEL, SUMS_KERNEL = "grouped_linear_strips_backward", "grouped_linear_strips_sums"
_SOURCE = Path(__file__).with_name("strips_backward.cu")
_HEADER = Path(__file__).parent.parent / "common" / "hopper_activations.h"
_ROWS = 32  # tokens of a tile
_SIZE = 2  # bytes of a number
_STEP = 1024
_SWIZZLED = 128  # bytes of a row of the copy engine's widest swizzle
_BOX = 256  # columns that one copy moves
_SHARED, _BLOCK_SHARED = 228 * 1024, 227 * 1024  # of a multiprocessor, of a block
_RESERVED = 1024  # bytes of a block that the system takes
_OVERHEAD = 2 * 1024  # the barriers, and what aligns them
_BEYOND = 4096  # bytes behind x that a window may reach
_REGISTERS, _MOST_REGISTERS = 65536, 255
_SERVICE_REGISTERS = 40
_OTHER_REGISTERS = 44  # of a thread: fragments, addresses, counters
_GOOD_WARPS, _MOST_WARPS = 8, 16
_PARTS = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2))  # of a group: warps, those across
_MOST_STRIP = 512  # bytes
_MOST_STAGES = 6
_LEAST_TILES = 4  # of a block, else its share costs more than its products
_SUMS_THREADS = 256
_MOST = 2**23
_MAX_PLANS = 1024


@dataclass(frozen=True)
class StripsBackwardConfig:
    """One way to launch the kernel.

    Attributes:
        groups: groups of a strip.
        parts: warps of a group.
        across: how many of them lie along the columns of dW; the others along its rows.
        stages: tiles of dy, saved and x in shared memory.
        outs: tiles of dx in shared memory.
        blocks: blocks of a multiprocessor.
    """

    groups: int
    parts: int
    across: int = 1
    stages: int = 4
    outs: int = 2
    blocks: int = 1


def _window(groups: int, features: int) -> int:
    """Words of a group, and of what lies before it from 16 bytes on."""
    early = 0 if groups == 1 or features % 8 == 0 else 3 if features % 4 else 2
    return features // 2 + early


def _tile_bytes(config: StripsBackwardConfig, features: int) -> int:
    """Room for a tile; swizzled ones begin at multiples of this step."""
    return -(-_ROWS * config.groups * features * _SIZE // _STEP) * _STEP


def shared_bytes(config: StripsBackwardConfig, k: int, n: int, saved: bool, needs: Needs) -> int:
    """Dynamic shared memory of a block."""
    dy, x = (_tile_bytes(config, width) for width in (n, k))
    stage = dy * (2 if saved else 1) + (x if needs[1] else 0)
    outs = config.outs * x if needs[0] else 0
    return _OVERHEAD + config.stages * stage + max(outs, _BEYOND)


def registers(config: StripsBackwardConfig, k: int, n: int) -> int:
    """About how many registers a thread takes."""
    rows, columns = -(-_window(config.groups, n) // 8), -(-_window(config.groups, k) // 4)
    dw = -(-rows // (config.parts // config.across)) * -(-columns // config.across)
    words = _window(config.groups, n)
    of_tile = 2 * (words // 8) + (0 if words % 8 == 0 else 1 if words % 8 <= 4 else 2)
    tiles = -(-k // 8)
    return 4 * dw + -(-tiles // config.parts) * (of_tile + 4) + _OTHER_REGISTERS


def service_warps(config: StripsBackwardConfig) -> int:
    """Warps that move tiles: one, or four of which three let the others have their registers."""
    warps = config.groups * config.parts
    return 4 if warps % 4 == 0 and warps > 4 and config.blocks == 1 else 1


def limit(config: StripsBackwardConfig) -> tuple[int, int]:
    """Registers of a thread that computes, and at launch."""
    warps, service = config.groups * config.parts, service_warps(config)
    quarter = -(-(warps + service) * config.blocks // 4)  # warps of a part of a multiprocessor
    launch = min(_MOST_REGISTERS, _REGISTERS // (quarter * 128) // 8 * 8)
    if service == 1:
        return launch, launch
    return (launch * quarter - _SERVICE_REGISTERS) // (warps // 4) // 8 * 8, launch


def reason_against(config: StripsBackwardConfig, groups: int, k: int, n: int) -> str | None:
    """Why such groups cannot be cut in that way, or None."""
    p, parts = config.groups, config.parts
    if k % 2 or n % 2 or groups % p or p * k % 8 or p * n % 8:
        return "strips must be of whole 16 bytes"
    for features in (k, n):
        if p * features * _SIZE % _SWIZZLED and p * features > _BOX:
            return f"rows of {p * features} numbers take several copies"
    rows = -(-_window(p, n) // 8)
    if parts % config.across or parts // config.across > rows or parts > -(-k // 8):
        return "more warps than tiles"
    if -(-_window(p, k) // 4) < config.across or p * parts > _MOST_WARPS:
        return "more warps than tiles"
    return None


@lru_cache(maxsize=1024)
def strips_backward_config(
    groups: int, k: int, n: int, saved: bool = True, needs: Needs = (True, True, True)
) -> StripsBackwardConfig | None:
    """The configuration for such groups of 16-bit numbers; None where none serves."""
    if max(k, n) > 128:
        return None
    widths = [p for p in (8, 4, 2, 1) if p * max(k, n) * _SIZE <= _MOST_STRIP]
    for least in (_GOOD_WARPS, 1):
        for p in widths:
            for parts, across in _PARTS:
                config = StripsBackwardConfig(p, parts, across)
                if (
                    p * parts >= least
                    and reason_against(config, groups, k, n) is None
                    and registers(config, k, n) <= limit(config)[0]
                ):
                    return _with_stages(config, k, n, saved, needs)
    return None


def _with_stages(
    config: StripsBackwardConfig, k: int, n: int, saved: bool, needs: Needs
) -> StripsBackwardConfig | None:
    """As many stages as shared memory holds."""
    for stages in range(_MOST_STAGES, 1, -1):
        sizes = config.groups, config.parts, config.across, stages, config.outs, config.blocks
        made = StripsBackwardConfig(*sizes)
        if fits(made, k, n, saved, needs):
            return made
    return None


def fits(config: StripsBackwardConfig, k: int, n: int, saved: bool, needs: Needs) -> bool:
    """Whether a multiprocessor's shared memory holds its blocks."""
    shared = shared_bytes(config, k, n, saved, needs)
    return shared <= _BLOCK_SHARED and (shared + _RESERVED) * config.blocks <= _SHARED


def source(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: StripsBackwardConfig,
) -> str:
    """The complete CUDA C++ source of one specialisation."""
    macros = {
        **{f"ACT_{name.upper()}": number for number, name in enumerate(NAMES)},
        "ACT": f"ACT_{activation.upper()}",
        "IS_BF16": int(dtype is torch.bfloat16),
        "K": k,
        "N": n,
        "P": config.groups,
        "PARTS": config.parts,
        "ACROSS": config.across,
        "STAGES": config.stages,
        "OUTS": config.outs,
        "BLOCKS": config.blocks,
        "SERVICE_WARPS": service_warps(config),
        "REGISTERS": limit(config)[0] if service_warps(config) > 1 else 0,
        "SERVICE_REGISTERS": _SERVICE_REGISTERS,
        **{f"NEED_{name}": int(need) for name, need in zip(("DX", "DW", "DB"), needs, strict=True)},
    }
    text = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    return text + _HEADER.read_text() + _SOURCE.read_text()


@cache
def _kernels(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: StripsBackwardConfig,
    device: int,
) -> tuple[driver.Kernel, driver.Kernel]:
    text = source(dtype, k, n, activation, needs, config)
    cubin = driver.compile_cubin(text, "strips_backward.cu", ARCH)
    shared = shared_bytes(config, k, n, activation != "none", needs)
    return driver.Kernel(cubin, KERNEL, shared, device), driver.Kernel(
        cubin, SUMS_KERNEL, 0, device
    )


def reason_not(p: Problem) -> str | None:
    """Why the kernel cannot serve a backward Problem, or None."""
    if p.device != "cuda":
        return "its kernel runs on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "its kernel is written for compute capability 9.0"
    if p.dtype not in ("bfloat16", "float16"):
        return f"serves bfloat16 and float16, not {p.dtype}"
    if (p.option("order"), p.option("x"), p.option("w")) != ("tokens", "dense", "dense"):
        return "serves dense tensors, tokens first"
    groups, k, n = p.dim("G"), p.dim("K"), p.dim("N")
    if strips_backward_config(groups, k, n) is None:
        return f"no strip of {groups} groups of {k} to {n} features fits: 16 bytes, registers"
    if max(p.dim("M"), groups * k, groups * n) > _MOST:
        return f"sizes must stay below {_MOST}"
    return None


def serves(dy: Tensor, saved: Tensor | None, x: Tensor, weight: Tensor, order: str) -> bool:
    """Whether the kernel takes such tensors: tokens first, dense groups, rows at 16 bytes."""
    return (
        x.shape[0] == 1
        and x.element_size() == 2
        and order == "tokens"
        and all(t is None or (t.dtype is x.dtype and _has_dense_rows(t)) for t in (dy, saved, x))
        and weight.dtype is x.dtype
        and weight.is_contiguous()
    )


def _has_dense_rows(t: Tensor) -> bool:
    _, m, groups, features = t.shape
    if (t.stride(3), t.stride(2)) != (1, features) or t.data_ptr() % 16:
        return False
    return m == 1 or (t.stride(1) % 8 == 0 and t.stride(1) >= groups * features)


_plans: dict[Any, StripsBackward] = {}


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
    *,
    config: StripsBackwardConfig | None = None,
) -> Gradients:
    """(dx, dW, db), each None where not needed, in one pass and the sums of its shares.

    Args:
        dy: (B, L, G, N); bfloat16 or float16. What ``serves`` refuses goes to the Triton backend.
        saved: (B, L, G, N), dtype of dy: the output y for relu, leaky_relu, sigmoid and tanh, the
            pre-activation for the others, None for ``"none"``.
        x: (B, L, G, K), dtype of dy.
        weight: (G, N, K), dtype of dy.
        activation: name of the activation.
        needs: which of dx, dW and db are wanted.
        order: how dx lies in memory.
        config: launch configuration; None picks ``strips_backward_config``.

    Returns:
        dx (B, L, G, K), dW (G, N, K) and db (G, N) in dy's dtype. Products and sums accumulate
        in float32 over dpre rounded to dy's dtype, in a fixed order.
    """
    groups, n, k = weight.shape
    if activation == "none":
        saved = None
    if config is None:
        config = strips_backward_config(groups, k, n, saved is not None, needs)
    empty = not x.numel() * dy.numel() or not any(needs)
    if config is None or empty or not serves(dy, saved, x, weight, order):
        from fastlinear.ops.grouped_linear import triton_backward

        return triton_backward.backward(dy, saved, x, weight, activation, needs, order)
    rows = [None if t is None else t.stride(1) for t in (dy, saved, x)]
    key = (x.shape, *rows, n, x.dtype, x.device, activation, needs, config)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = StripsBackward(dy, saved, x, weight, activation, needs, config)
    dx = layouts.empty(x.shape, order, x, x.dtype) if needs[0] else None
    dw = torch.empty((groups, n, k), dtype=x.dtype, device=x.device) if needs[1] else None
    db = torch.empty((groups, n), dtype=x.dtype, device=x.device) if needs[2] else None
    plan(dy, saved, x, weight, dx, dw, db)
    return dx, dw, db


class Split:
    """How strips * tiles tiles are shared out: block b takes ``each`` of them, or one more.

    Attributes:
        blocks: of the launch.
        each, more: tiles of a block; how many blocks take one more.
        slots: the most blocks that share a strip.
    """

    def __init__(self, strips: int, tiles: int, at_once: int) -> None:
        total = strips * tiles
        self.blocks = min(total, at_once, max(strips, total // _LEAST_TILES))
        self.each, self.more = divmod(total, self.blocks)
        ends = (
            (self.block_of(s * tiles), self.block_of((s + 1) * tiles - 1)) for s in range(strips)
        )
        self.slots = max(last - first + 1 for first, last in ends)

    def block_of(self, tile: int) -> int:
        """The block that takes a tile."""
        full = self.more * (self.each + 1)
        if tile < full:
            return tile // (self.each + 1)
        return self.more + (tile - full) // self.each


class StripsBackward:
    """Prepared launches, for tensors of one kind at any address."""

    def __init__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        activation: str,
        needs: Needs,
        config: StripsBackwardConfig,
    ) -> None:
        _, m, groups, k = x.shape
        n = weight.shape[1]
        assert x.device.index is not None
        self._device: int = x.device.index
        driver.make_current(self._device)
        with driver.loading_allowed():
            kernel, sums = _kernels(x.dtype, k, n, activation, needs, config, self._device)
        tiles = -(-m // _ROWS)
        units = device_facts(x.device).units
        split = Split(groups // config.groups, tiles, units * config.blocks)
        shares = split.slots if split.slots > 1 and any(needs[1:]) else 0
        self._shares = (
            (shares, groups, n, k) if shares and needs[1] else None,
            (shares, groups, n) if shares and needs[2] else None,
        )
        self._lock = threading.Lock()
        read = [self._map(x if t is None else t, config.groups) for t in (dy, saved, x)]
        self._maps = [*read, self._map(x, config.groups, dense=True)]
        self._pointers = [ctypes.c_void_p(0) for _ in range(3)]
        whose = [ctypes.c_int(v) for v in (tiles, split.each, split.more)]
        numbers = [ctypes.c_int(groups), ctypes.c_int(split.slots), *whose]
        arguments: list[driver.Argument] = [*self._maps, *self._pointers, *numbers]
        threads = 32 * (config.groups * config.parts + service_warps(config))
        self._launch = driver.Launch(kernel, threads, 1, arguments)
        self._launch.set_grid(split.blocks)
        self._sums: driver.Launch | None = None
        self._sums_pointers = [ctypes.c_void_p(0) for _ in range(4)]
        if shares:
            pairs = (groups * n * k // 2 if needs[1] else 0, groups * n // 2 if needs[2] else 0)
            dw_blocks, db_blocks = (-(-count // _SUMS_THREADS) for count in pairs)
            self._sums = driver.Launch(
                sums,
                _SUMS_THREADS,
                1,
                [*self._sums_pointers, ctypes.c_int(groups), *whose, ctypes.c_int(dw_blocks)],
            )
            self._sums.set_grid(dw_blocks + db_blocks)

    def _map(self, t: Tensor, strip: int, dense: bool = False) -> driver.TensorMap:
        """Tiles of a strip's columns, or of 128 bytes where rows of a strip are multiples of that.

        With ``dense``, of a dense tensor of t's shape.
        """
        _, m, groups, features = t.shape
        dense = dense or m == 1
        plain = strip * features * _SIZE % _SWIZZLED != 0
        return driver.TensorMap(
            *(DTYPE_NAMES[t.dtype], m, groups * features),
            *(groups * features if dense else t.stride(1), _ROWS),
            *(strip * features if plain else _SWIZZLED // _SIZE, t.data_ptr(), self._device),
            plain=plain,
        )

    def __call__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """Launch on the current stream; dx, dw and db are dense, None where not wanted."""
        if self._device != torch._C._cuda_getDevice():
            with torch.cuda.device(self._device):
                self(dy, saved, x, weight, dx, dw, db)
            return
        parts = [
            result if shape is None else torch.empty(shape, dtype=torch.float32, device=x.device)
            for shape, result in zip(self._shares, (dw, db), strict=True)
        ]
        with self._lock:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            for map_, tensor in zip(self._maps, (dy, saved, x, dx), strict=True):
                if tensor is not None:
                    map_.point_at(tensor.data_ptr())
            _point(self._pointers, (weight, *parts))
            self._launch.run(stream)
            if self._sums is not None:
                _point(self._sums_pointers, (*parts, dw, db))
                self._sums.run(stream)


def _point(pointers: list[ctypes.c_void_p], tensors: tuple[Tensor | None, ...]) -> None:
    for pointer, tensor in zip(pointers, tensors, strict=True):
        pointer.value = 0 if tensor is None else tensor.data_ptr()
