"""Backward of many narrow groups on Hopper, in CUDA C++: ``strips_backward.cu``.

One pass over dy, what the forward saved, and x: dx leaves at once, dW and db stay in registers over
a block's tiles of tokens and leave as float32 shares, which a second launch adds up in order.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.problem import Problem
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.door_launch import prepared
from fastlinear.ops.common.door_program import Program
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import strips_tiles
from fastlinear.ops.grouped_linear.operands import Backward, Numbers
from fastlinear.ops.grouped_linear.reference import Gradients, Needs
from fastlinear.ops.grouped_linear.strips_backward_config import (
    WORTH_PLAIN,
    StripsBackwardConfig,
    limit,
    service_warps,
    shared_bytes,
    strips_backward_config,
)
from fastlinear.ops.grouped_linear.strips_tiles import (
    SERVICE_REGISTERS,
    SIZE,
    WORTH,
    Cut,
    Split,
    has_dense_rows,
    ordinal,
    side_by_side,
    source_of,
)

ARCH = "sm_90a"
KERNEL, SUMS_KERNEL = "grouped_linear_strips_backward", "grouped_linear_strips_sums"
_SUMS_THREADS = 256
_MAX_PLANS = 1024


def source(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: StripsBackwardConfig,
    shared: bool = False,
) -> str:
    """The complete CUDA C++ source of one specialisation."""
    macros = {
        "IS_BF16": int(dtype is torch.bfloat16),
        "SIZE": SIZE,
        "SHARED": int(shared),
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
        "SERVICE_REGISTERS": SERVICE_REGISTERS,
        **{f"NEED_{name}": int(need) for name, need in zip(("DX", "DW", "DB"), needs, strict=True)},
    }
    return source_of("strips_backward.cu", activation, macros)


@cache
def _kernels(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: StripsBackwardConfig,
    shared: bool,
    device: int,
) -> tuple[driver.Kernel, driver.Kernel]:
    text = source(dtype, k, n, activation, needs, config, shared)
    cubin = driver.compile_cubin(text, "strips_backward.cu", ARCH)
    room = shared_bytes(config, k, n, activation != "none", needs)
    sums = driver.Kernel(cubin, SUMS_KERNEL, 0, device)
    return driver.Kernel(cubin, KERNEL, room, device), sums


def reason_not(p: Problem) -> str | None:
    """Why the kernel cannot serve a backward Problem, or None."""
    reason = strips_tiles.reason_not(p)
    if reason is not None:
        return reason
    if p.dtype not in ("bfloat16", "float16"):
        return f"serves bfloat16 and float16, not {p.dtype}"
    m, groups, k, n = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    if strips_backward_config(side_by_side(p.option("order"), m, groups), k, n) is None:
        return strips_tiles.no_strip(p)
    return None


def serves(dy: Tensor, saved: Tensor | None, x: Tensor, weight: Tensor, order: str) -> bool:
    """Whether the kernel takes such tensors: tokens or groups first, rows at 16 bytes."""
    return (
        x.shape[0] == 1
        and x.element_size() == SIZE
        and all(
            t is None or (t.dtype is x.dtype and has_dense_rows(t, order)) for t in (dy, saved, x)
        )
        and weight.dtype is x.dtype
        and weight.is_contiguous()
    )


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
        side = side_by_side(order, x.shape[1], groups)
        config = strips_backward_config(side, k, n, saved is not None, needs)
    empty = not x.numel() * dy.numel() or not any(needs)
    if config is None or empty or not serves(dy, saved, x, weight, order):
        from fastlinear.ops.grouped_linear import triton_backward

        return triton_backward.backward(dy, saved, x, weight, activation, needs, order)
    rows = [None if t is None else t.stride(1) for t in (dy, saved, x)]
    key = (x.shape, *rows, n, x.dtype, x.device, activation, needs, order, config)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        given = (dy, saved, x, weight, activation, needs, order, config)
        plan = _plans[key] = StripsBackward(*given)
    dx = layouts.empty(x.shape, order, x, x.dtype) if needs[0] else None
    dw = torch.empty((groups, n, k), dtype=x.dtype, device=x.device) if needs[1] else None
    db = torch.empty((groups, n), dtype=x.dtype, device=x.device) if needs[2] else None
    plan(dy, saved, x, weight, dx, dw, db)
    return dx, dw, db


def backward_steps(call: Backward) -> Numbers | None:
    """``backward`` as steps of a program; None where it is more than its launches."""
    dy, saved, x, weight = call.tensors
    groups, n, k = weight.shape
    side = side_by_side(call.order, x.shape[1], groups)
    config = strips_backward_config(side, k, n, saved is not None, call.needs)
    if config is None or not any(call.needs) or not serves(dy, saved, x, weight, call.order):
        from fastlinear.ops.grouped_linear import triton_backward

        return triton_backward.backward_steps(call)
    plan = StripsBackward(*(dy, saved, x, weight, call.activation, call.needs, call.order, config))
    found = call.results()
    plan.steps(call.program, *call.numbers, *found)
    return found


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
        order: str,
        config: StripsBackwardConfig,
    ) -> None:
        _, m, groups, k = x.shape
        n = weight.shape[1]
        self._device = ordinal(x)
        driver.make_current(self._device)
        cut = self._cut = Cut.of(order, m, groups, config.groups)
        how = (activation, needs, config, cut.shared)
        with driver.loading_allowed():
            kernel, sums = _kernels(x.dtype, k, n, *how, self._device)
        units = device_facts(x.device).units
        worth = WORTH_PLAIN if saved is None else WORTH
        split = Split(cut.strips, cut.tiles, units * config.blocks, worth)
        slots = split.slots * (cut.p if cut.shared else 1)
        shares = slots if slots > 1 and any(needs[1:]) else 0
        self._shares = (
            (shares, groups, n, k) if shares and needs[1] else None,
            (shares, groups, n) if shares and needs[2] else None,
        )
        self._lock = threading.Lock()
        read = [self._map(x if t is None else t) for t in (dy, saved, x)]
        self._maps = [*read, self._map(x, dense=True)]
        self._pointers = [ctypes.c_void_p(0) for _ in range(7)]
        whose = [ctypes.c_int(v) for v in (cut.tiles, split.each, split.more)]
        numbers = [*(ctypes.c_int(v) for v in (cut.rows, groups, slots)), *whose]
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

    def _map(self, t: Tensor, dense: bool = False) -> driver.TensorMap:
        """Tiles of strips of t, or with ``dense`` of a dense tensor of t's shape."""
        _, m, groups, features = t.shape
        stride = groups * features if dense or m == 1 else t.stride(1)
        return self._cut.map(t.dtype, features, stride, t.data_ptr(), self._device)

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
            _point(self._pointers, (weight, *parts, dy, saved, x, dx))
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
        maps = zip(self._maps, (dy, saved, x, dx), strict=True)
        pointers = zip(self._pointers, (weight, *parts, dy, saved, x, dx), strict=True)
        program.launch(prepared(self._launch, [*maps, *pointers], self))
        if self._sums is not None:
            sums = zip(self._sums_pointers, (*parts, dw, db), strict=True)
            program.launch(prepared(self._sums, list(sums), self))


def _point(pointers: list[ctypes.c_void_p], tensors: tuple[Tensor | None, ...]) -> None:
    for pointer, tensor in zip(pointers, tensors, strict=True):
        pointer.value = 0 if tensor is None else tensor.data_ptr()
