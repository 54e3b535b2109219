"""Backward of groups of more than 128 features on Hopper, in CUDA C++: ``wide_backward.cu``.

One pass over dy, what the forward saved, and x: dx leaves at once, dW and db stay in registers over
a block's tiles of tokens and leave as float32 shares, which a second launch adds up in order.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common import hopper
from fastlinear.ops.common.door_launch import prepared
from fastlinear.ops.common.door_program import Program
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import strips_backward, strips_tiles
from fastlinear.ops.grouped_linear import wide_backward_config as configs
from fastlinear.ops.grouped_linear.group_map import GroupMap
from fastlinear.ops.grouped_linear.operands import Backward, Numbers
from fastlinear.ops.grouped_linear.reference import Gradients, Needs
from fastlinear.ops.grouped_linear.wide_backward_config import (
    COLUMNS,
    TOKENS,
    WideBackwardConfig,
    chunks_of,
    halves,
    padded,
    shared_bytes,
    wide_backward_config,
)

ARCH = hopper.ARCH
KERNEL, SUMS_KERNEL = "grouped_linear_wide_backward", "grouped_linear_wide_sums"
_SUMS_THREADS = 256
_MAX_PLANS = 1024
_HERE = Path(__file__).parent


def source(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: WideBackwardConfig,
) -> str:
    """The complete CUDA C++ source of one specialisation."""
    # products() of the shared headers: 64 features of each of two warpgroups, from one stage
    shape = {"BM": 128, "STAGES": 1, "PINGPONG": 0, "GROUP_M": 1}
    own = {
        "K": k,
        "N": n,
        "TILES": config.tiles,
        "PARTS": config.saved,
        "HELD": config.held,
        "OUTS": config.outs,
        "SPLIT": int(config.split),
        **{f"NEED_{name}": int(need) for name, need in zip(("DX", "DW", "DB"), needs, strict=True)},
    }
    macros = {**shape, "CLUSTER": 2 if config.cluster else 1, **own}
    header = _HERE / "wide_instructions.h"
    text = hopper.device_source(header, macros, padded(n), dtype, activation, True, True)
    return text + (_HERE / "wide_backward.cu").read_text()


@cache
def _kernels(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: WideBackwardConfig,
    device: int,
) -> tuple[driver.Kernel, driver.Kernel]:
    text = source(dtype, k, n, activation, needs, config)
    cubin = driver.compile_cubin(text, "wide_backward.cu", ARCH)
    shared = shared_bytes(config, n, activation != "none", needs)
    return driver.Kernel(cubin, KERNEL, shared, device), driver.Kernel(
        cubin, SUMS_KERNEL, 0, device
    )


def reason_not(p: Problem) -> str | None:
    """Why the kernel cannot serve a backward Problem, or None."""
    reason = strips_tiles.reason_not(p)
    if reason is not None:
        return reason
    if p.dtype not in ("bfloat16", "float16"):
        return f"serves bfloat16 and float16, not {p.dtype}"
    if p.option("order") != "tokens":
        return "serves tensors that lie tokens first"
    k, n = p.dim("K"), p.dim("N")
    if not configs.serves(k, n):
        return f"serves groups of 136 to 256 features in multiples of 8, not {k} to {n}"
    return None


def serves(dy: Tensor, saved: Tensor | None, x: Tensor, weight: Tensor, order: str) -> bool:
    """Whether the kernel takes such tensors: tokens first, dense groups, rows at 16 bytes."""
    return (
        order == "tokens"
        and configs.serves(weight.shape[2], weight.shape[1])
        and weight.data_ptr() % 16 == 0
        and strips_backward.serves(dy, saved, x, weight, order)
    )


_plans: dict[Any, WideBackward] = {}


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
    *,
    config: WideBackwardConfig | None = None,
    chunks: int | None = None,
) -> Gradients:
    """(dx, dW, db), each None where not needed, in one pass and the sums of its shares.

    Args:
        dy: (B, L, G, N); bfloat16 or float16. What ``serves`` refuses, and db alone, goes to the
            Triton backend.
        saved: (B, L, G, N), dtype of dy: the output y for relu, leaky_relu, sigmoid and tanh, the
            pre-activation for the others, None for ``"none"``.
        x: (B, L, G, K), dtype of dy.
        weight: (G, N, K), dtype of dy.
        activation: name of the activation.
        needs: which of dx, dW and db are wanted.
        order: how dx lies in memory.
        config: launch configuration; None picks ``wide_backward_config``.
        chunks: into how many chunks a group's tokens are cut; None picks ``chunks_of``.

    Returns:
        dx (B, L, G, K), dW (G, N, K) and db (G, N) in dy's dtype. Products and sums accumulate
        in float32 over dpre rounded to dy's dtype, in a fixed order.
    """
    groups, n, k = weight.shape
    if activation == "none":
        saved = None
    empty = not x.numel() * dy.numel() or not any(needs[:2])
    if empty or not serves(dy, saved, x, weight, order):
        from fastlinear.ops.grouped_linear import triton_backward

        return triton_backward.backward(dy, saved, x, weight, activation, needs, order)
    if config is None:
        config = wide_backward_config(k, n, saved is not None, needs)
        assert config is not None
    rows = [None if t is None else t.stride(1) for t in (dy, saved, x)]
    key = (x.shape, *rows, n, x.dtype, x.device, activation, needs, config, chunks)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        made = WideBackward(dy, saved, x, weight, activation, needs, config, chunks)
        plan = _plans[key] = made
    dx = layouts.empty(x.shape, order, x, x.dtype) if needs[0] else None
    dw = torch.empty((groups, n, k), dtype=x.dtype, device=x.device) if needs[1] else None
    db = torch.empty((groups, n), dtype=x.dtype, device=x.device) if needs[2] else None
    plan(dy, saved, x, weight, dx, dw, db)
    return dx, dw, db


def backward_steps(call: Backward) -> Numbers | None:
    """``backward`` as steps of a program; None where it is more than its launches."""
    dy, saved, x, weight = call.tensors
    if not any(call.needs[:2]) or not serves(dy, saved, x, weight, call.order):
        from fastlinear.ops.grouped_linear import triton_backward

        return triton_backward.backward_steps(call)
    _, n, k = weight.shape
    config = wide_backward_config(k, n, saved is not None, call.needs)
    assert config is not None
    plan = WideBackward(dy, saved, x, weight, call.activation, call.needs, config, None)
    found = call.results()
    plan.steps(call.program, *call.numbers, *found)
    return found


class WideBackward:
    """Prepared launches, for tensors of one kind at any address."""

    def __init__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        activation: str,
        needs: Needs,
        config: WideBackwardConfig,
        chunks: int | None,
    ) -> None:
        _, m, groups, k = x.shape
        n = weight.shape[1]
        self._device = strips_tiles.ordinal(x)
        driver.make_current(self._device)
        with driver.loading_allowed():
            kernel, sums = _kernels(x.dtype, k, n, activation, needs, config, self._device)
        if chunks is None:
            units = device_facts(x.device).units
            chunks = chunks_of(m, groups, k, n, units, any(needs[1:]))
        shares = chunks if chunks > 1 and any(needs[1:]) else 0
        self._shares = (
            (shares, groups, n, k) if shares and needs[1] else None,
            (shares, groups, n) if shares and needs[2] else None,
        )
        self._lock = threading.Lock()
        self._maps = [
            self._map(dy, TOKENS // 2 if config.split else TOKENS),
            self._map(dy if saved is None else saved, TOKENS // 2),
            self._map(x),
            self._map(x, dense=True),
            self._map_of((groups, n, k), n * k, (1, COLUMNS, COLUMNS), weight),
        ]
        self._pointers = [ctypes.c_void_p(0) for _ in range(3)]
        numbers = [ctypes.c_int(v) for v in (groups, chunks, -(-m // TOKENS))]
        arguments: list[driver.Argument] = [*self._maps, *self._pointers, *numbers]
        cluster = 2 if config.cluster else 1
        self._launch = driver.Launch(kernel, hopper.THREADS, cluster, arguments)
        self._launch.set_grid(groups * chunks * halves(k))
        self._sums: driver.Launch | None = None
        self._sums_pointers = [ctypes.c_void_p(0) for _ in range(4)]
        if shares:
            fours = (groups * n * k // 4 if needs[1] else 0, groups * n // 4 if needs[2] else 0)
            dw_blocks, db_blocks = (-(-count // _SUMS_THREADS) for count in fours)
            counts = [ctypes.c_int(v) for v in (groups, chunks, dw_blocks)]
            self._sums = hopper.EarlyLaunch(sums, _SUMS_THREADS, 1, [*self._sums_pointers, *counts])
            self._sums.set_grid(dw_blocks + db_blocks)

    def _map(self, t: Tensor, tokens: int = TOKENS, dense: bool = False) -> GroupMap:
        """Boxes of t, or with ``dense`` of a dense tensor of t's shape."""
        _, m, groups, features = t.shape
        stride = groups * features if dense or m == 1 else t.stride(1)
        return self._map_of((m, groups, features), stride, (tokens, 1, COLUMNS), t)

    def _map_of(
        self, shape: tuple[int, int, int], stride: int, box: tuple[int, int, int], t: Tensor
    ) -> GroupMap:
        return GroupMap(DTYPE_NAMES[t.dtype], shape, stride, box, t.data_ptr(), self._device)

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
            for map_, tensor in zip(self._maps, (dy, saved, x, dx, weight), strict=True):
                if tensor is not None:
                    map_.point_at(tensor.data_ptr())
            _point(self._pointers, (weight, *parts))
            self._launch.run(stream)
            if self._sums is not None:
                _point(self._sums_pointers, (*parts, dw, db))
                self._sums.run(stream)

    def steps(
        self,
        program: Program,
        dy: int,
        saved: int | None,
        x: int,
        weight: int,
        dx: int | None,
        dw: int | None,
        db: int | None,
    ) -> None:
        """A call of tensors of these numbers; the launches are that program's from then on."""
        parts = [
            result if shape is None else program.empty(shape, torch.float32, x)
            for shape, result in zip(self._shares, (dw, db), strict=True)
        ]
        maps = zip(self._maps, (dy, saved, x, dx, weight), strict=True)
        pointers = zip(self._pointers, (weight, *parts), strict=True)
        program.launch(prepared(self._launch, [*maps, *pointers], self))
        if self._sums is not None:
            sums = zip(self._sums_pointers, (*parts, dw, db), strict=True)
            program.launch(prepared(self._sums, list(sums), self))


def _point(pointers: list[ctypes.c_void_p], tensors: tuple[Tensor | None, ...]) -> None:
    for pointer, tensor in zip(pointers, tensors, strict=True):
        pointer.value = 0 if tensor is None else tensor.data_ptr()
