"""A CUDA launch as memory that the compiled fast path fills in: configuration, arguments,
addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastlinear.native import cuda_driver as driver

Y = -1
"""Stands for the result among the tensors of a call: 0 x, 1 weight, 2 bias."""

_POINTER, _TENSOR_MAP = 0, 1  # as plans.h numbers them


@dataclass(frozen=True)
class FastpathLaunch:
    """One kernel launch of fixed shapes, with memory of its own.

    Attributes:
        function: the driver's handle of the kernel.
        config, slots: addresses of its CUlaunchConfig and of the array of argument addresses.
        tensors: arguments that hold an address, and which of the tape's tensors it is of.
        memory: whatever config and slots lie in.
        hooks: lists of what must be called around a launch; the fast path launches while all are
            empty.
        offsets: for each of ``tensors`` how many bytes behind its first element; () for none.
    """

    function: int
    config: int
    slots: int
    tensors: tuple[tuple[driver.TensorMap | ctypes.c_void_p, int], ...]
    memory: Any
    hooks: tuple[list[Any], ...] = ()
    offsets: tuple[int, ...] = ()

    def kernel(self) -> tuple[Any, ...]:
        """The kernel's tuple, as ``plans.h`` describes it."""
        offsets = self.offsets or (0,) * len(self.tensors)
        places = tuple(
            (_TENSOR_MAP, argument.pointer, tensor, offset)
            if isinstance(argument, driver.TensorMap)
            else (_POINTER, ctypes.addressof(argument), tensor, offset)
            for (argument, tensor), offset in zip(self.tensors, offsets, strict=True)
        )
        memory = (self.memory, self.tensors)
        return (self.function, self.config, self.slots, places, self.hooks, memory)


def launch_of(
    function: int,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    arguments: Sequence[driver.Argument],
    tensors: Sequence[tuple[driver.TensorMap | ctypes.c_void_p, int]],
    hooks: tuple[list[Any], ...],
    owner: Any,
) -> FastpathLaunch:
    """A launch without attributes; ``tensors`` are those of ``arguments`` that hold an address.

    ``owner`` keeps the function loaded.
    """
    slots = (ctypes.c_void_p * len(arguments))(*map(driver.slot_of, arguments))
    config = driver._LaunchConfig()
    config.grid[:] = grid
    config.block[:] = [threads, 1, 1]
    config.shared_bytes = shared_bytes
    return FastpathLaunch(
        function,
        ctypes.addressof(config),
        ctypes.addressof(slots),
        tuple(tensors),
        (config, slots, tuple(arguments), owner),
        hooks,
    )
