"""Launches of gated_mlp's kernels as steps of the compiled fast path's tapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.fastpath_launch import FastpathLaunch, prepared
from fastlinear.ops.gated_mlp import bias_sums as sums
from fastlinear.ops.gated_mlp import cuda
from fastlinear.ops.gated_mlp.cuda_config import config_for
from fastlinear.ops.gated_mlp.cuda_plans import Plan, lock, readable

Place = tuple[int, int]
"""Memory that a kernel gets: a tape's tensor, and bytes behind its first element."""
Laid = tuple[Tensor, Place] | None
"""An argument of a kernel: a tensor laid out as it is, and where it lies. None for null."""


def gate(arguments: Sequence[Laid], activation: str, save: bool) -> FastpathLaunch | None:
    """``cuda.gate_plan`` with its tensors in these places; None where ``cuda.gate`` copies one."""
    tensors, read = _tensors(arguments), [a[0] for a in arguments[:3] if a is not None]
    biases = [t for t in tensors[6:] if t is not None]
    copied = any(not b.is_contiguous() or b.data_ptr() % 4 for b in biases)
    if copied or not _read_in_place(read):
        return None
    config = config_for("forward", read[0].shape[0], read[1].shape[0])
    return _made(
        lambda: cuda.gate_plan(tensors, activation, save, config), read[0].device, arguments
    )


def through_down(
    arguments: Sequence[Laid], activation: str, needs_h: bool, config: cuda.Config
) -> FastpathLaunch | None:
    """``cuda.through_plan``, likewise."""
    tensors, read = _tensors(arguments), [a[0] for a in arguments[:4] if a is not None]
    if not _read_in_place(read):
        return None
    return _made(
        lambda: cuda.through_plan(tensors, activation, needs_h, config), read[0].device, arguments
    )


def bias_sums(arguments: Sequence[Laid], like: Tensor) -> FastpathLaunch:
    """``sums.sums_plan``, likewise."""
    return _made(lambda: sums.sums_plan(_tensors(arguments), like), like.device, arguments)


def shares(arguments: Sequence[Laid]) -> FastpathLaunch | None:
    """``sums.shares_plan``, likewise."""
    dy, out = _tensors(arguments)
    if dy is None or not _read_in_place([dy]):
        return None
    return _made(lambda: sums.shares_plan([dy, out]), dy.device, arguments)


def elementwise(
    arguments: Sequence[Laid], activation: str, order: str, *, backward: bool
) -> FastpathLaunch | None:
    """The Triton pass of a direction; None unless it has run on tensors laid out so."""
    from fastlinear.ops.gated_mlp import triton

    made: Any = triton.gate_backward_launch if backward else triton.gate_launch
    launch = made(tuple(_tensors(arguments)), activation, order)
    numbers = tuple(None if a is None else i for i, a in enumerate(arguments))
    found: FastpathLaunch | None = launch.in_fastpath(numbers)
    if found is None:
        return None
    slots = [(slot, arguments[i]) for slot, i in found.tensors]
    return _placed(found, slots)


def _tensors(arguments: Sequence[Laid]) -> list[Tensor | None]:
    return [None if a is None else a[0] for a in arguments]


def _read_in_place(tensors: Sequence[Tensor]) -> bool:
    """Whether TMA reads these matrices where they lie, on the current device."""
    if any(readable(t) is not t for t in tensors):
        return False
    return tensors[0].device.index == torch._C._cuda_getDevice()


def _made(
    make: Callable[[], Plan], device: torch.device, arguments: Sequence[Laid]
) -> FastpathLaunch:
    """A launch of its own memory: the fast path fills that in without Python's lock."""
    driver.make_current(device.index)
    with lock, driver.loading_allowed():
        plan = make()
    slots = list(zip(plan.slots, arguments, strict=True))
    return _placed(prepared(plan.launch, (), plan), slots)


def _placed(launch: FastpathLaunch, slots: Sequence[tuple[Any, Laid]]) -> FastpathLaunch:
    """The launch with these memories' places; slots of null stay null."""
    held = [(slot, a[1]) for slot, a in slots if a is not None]
    return replace(
        launch,
        tensors=tuple((slot, number) for slot, (number, _) in held),
        offsets=tuple(offset for _, (_, offset) in held),
    )
