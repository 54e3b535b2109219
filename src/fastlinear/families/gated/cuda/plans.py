"""Launches of gated_mlp's own kernels on Hopper, made once for tensors of one kind and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.families.linear.padded import aligned_copy
from fastlinear.kernels.cuda.hopper import ARCH, operand_layout
from fastlinear.kernels.cuda.prepared import Place, Plans, Prepared
from fastlinear.native import cuda_driver as driver

_kernels: dict[Any, driver.Kernel] = {}
_plans: Plans[Prepared] = Plans()


def compiled(key: Any, name: str, shared: int, text: Callable[[], str]) -> driver.Kernel:
    """The kernel of a source, for the device that the key ends with."""
    kernel = _kernels.get(key)
    if kernel is None:
        cubin = driver.compile_cubin(text(), f"{name}.cu", ARCH)
        kernel = _kernels[key] = driver.Kernel(cubin, name, shared, key[-1])
    return kernel


def run(
    key: Any, make: Callable[[], Prepared], like: Tensor, tensors: Sequence[Tensor | None]
) -> None:
    """Launch on tensors what ``make`` prepares for those of their kind."""

    def made() -> Prepared:
        driver.make_current(like.device.index)
        with torch.cuda.device(like.device), driver.loading_allowed():
            return make()

    _plans.of(key, made)(*tensors)


def launch_of(launch: driver.Launch, like: Tensor, slots: Sequence[Place]) -> Prepared:
    """A launch whose tensors' addresses these arguments hold, in order."""
    return Prepared(launch, like.device.index, [(slot, i) for i, slot in enumerate(slots)])


def readable(t: Tensor) -> Tensor:
    """A matrix whose rows TMA can read: itself or a copy."""
    if not t.is_contiguous() or t.shape[1] % 8:
        layout = operand_layout(tuple(t.shape), t.stride())
        if layout is None or layout[0] or (t.stride(1) != 1 and t.shape[1] != 1):
            t = aligned_copy(t)[:, : t.shape[1]]
    return t if t.data_ptr() % 16 == 0 else t.clone()
