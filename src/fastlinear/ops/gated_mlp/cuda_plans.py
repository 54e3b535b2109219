"""Launches of gated_mlp's own kernels on Hopper, made once for tensors of one kind and kept."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.hopper import ARCH, operand_layout

_MAX_PLANS = 1024

Slot = driver.TensorMap | ctypes.c_void_p


@dataclass(frozen=True)
class Plan:
    """One prepared launch: fixed shapes and layouts, any addresses."""

    launch: driver.Launch
    slots: Sequence[Slot]

    def run(self, tensors: Sequence[Tensor | None], stream: int) -> None:
        """Launch on tensors of the same kind, in the order of the slots."""
        for slot, tensor in zip(self.slots, tensors, strict=True):
            address = 0 if tensor is None else tensor.data_ptr()
            if isinstance(slot, driver.TensorMap):
                slot.point_at(address)
            else:
                slot.value = address
        self.launch.run(stream)


lock = threading.Lock()
"""Held while a launch is made."""
_kernels: dict[Any, driver.Kernel] = {}
_plans: dict[Any, Plan] = {}


def compiled(key: Any, name: str, shared: int, text: Callable[[], str]) -> driver.Kernel:
    """The kernel of a source, for the device that the key ends with."""
    kernel = _kernels.get(key)
    if kernel is None:
        cubin = driver.compile_cubin(text(), f"{name}.cu", ARCH)
        kernel = _kernels[key] = driver.Kernel(cubin, name, shared, key[-1])
    return kernel


def run(key: Any, make: Callable[[], Plan], like: Tensor, tensors: Sequence[Tensor | None]) -> None:
    index = like.device.index
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            run(key, make, like, tensors)
        return
    with lock:
        plan = _plans.get(key)
        if plan is None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            driver.make_current(index)
            with driver.loading_allowed():
                plan = _plans[key] = make()
        plan.run(tensors, torch._C._cuda_getCurrentRawStream(index))


def readable(t: Tensor) -> Tensor:
    """A matrix whose rows TMA can read: itself or a dense copy."""
    if not t.is_contiguous() or t.shape[1] % 8:
        layout = operand_layout(tuple(t.shape), t.stride())
        if layout is None or layout[0] or (t.stride(1) != 1 and t.shape[1] != 1):
            t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()
