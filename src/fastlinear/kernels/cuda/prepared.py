"""CUDA launches prepared once for tensors of one kind, at any address; how they are recorded."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastlinear.fastpath import recorder
from fastlinear.fastpath.launch import FastpathLaunch
from fastlinear.kernels.cuda import compiled
from fastlinear.native import cuda_driver as driver

_MAX_PLANS = 1024
_ALIGNMENT = 64  # of a TMA descriptor in host memory
_ANY = 1  # address bits that kernels take as they come: rows may begin anywhere
MAP_BYTES = 128
"""Of a TMA descriptor."""
Plan = TypeVar("Plan")
Place = driver.TensorMap | ctypes.c_void_p
"""An argument that holds the address of a tensor."""


class Block:
    """A kernel's one argument: a struct that holds TMA descriptors, addresses and numbers."""

    def __init__(self, size: int) -> None:
        memory = (ctypes.c_char * (size + 64))()
        skipped = -ctypes.addressof(memory) % 64
        self.argument = (ctypes.c_char * size).from_buffer(memory, skipped)  # keeps the memory
        self.base = ctypes.addressof(self.argument)
        self.places: list[tuple[Place, int]] = []
        self.masks: dict[int, int] = {}

    def map(self, at: int, of: driver.TensorMap, tensor: int) -> None:
        """A descriptor of the tensor of that number."""
        of.lie_at(self.base + at)
        self.places.append((of, tensor))

    def address(self, at: int, tensor: int, mask: int = _ANY) -> None:
        """The address of the tensor of that number; ``mask``: the bits of it that must stay."""
        self.places.append((ctypes.c_void_p.from_address(self.base + at), tensor))
        self.masks.setdefault(tensor, mask)

    def numbers(self, at: int, form: str, *values: int) -> None:
        """Numbers, as ``struct`` packs them."""
        struct.pack_into("<" + form, self.argument, at, *values)


class Prepared:
    """A launch whose arguments hold addresses of tensors, which each call writes into them.

    Args:
        launch: the launch; nothing else uses its memory.
        device: the ordinal of its device.
        places: arguments, each with the number of the tensor whose address it holds.
        masks: number of a tensor → the address bits that must stay as they are, 15 if left out.
    """

    def __init__(
        self,
        launch: driver.Launch,
        device: int,
        places: Sequence[tuple[Place, int]],
        masks: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._launch = launch
        self._device = device
        self._places = [(p, i) for p, i in places if not isinstance(p, driver.NoTensorMap)]
        self._masks = [masks.get(i, recorder.ALIGNMENT) for _, i in self._places]
        self._ran = False
        self._lock = threading.Lock()

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream of the device, or record the launch."""
        recording = recorder.active()
        if recording is not None:
            self._record(recording, tensors)
        elif self._device != torch._C._cuda_getDevice():
            with torch.cuda.device(self._device):
                self._run(tensors)
        else:
            self._run(tensors)

    def _run(self, tensors: Sequence[Tensor | None]) -> None:
        self._ran = True
        with self._lock:  # the driver copies the arguments before it returns
            for place, which in self._places:
                tensor = tensors[which]
                if isinstance(place, driver.TensorMap):
                    if tensor is not None:
                        place.point_at(tensor.data_ptr())
                else:
                    place.value = 0 if tensor is None else tensor.data_ptr()
            self._launch.run(torch._C._cuda_getCurrentRawStream(self._device))

    def _record(self, recording: recorder.Recording, tensors: Sequence[Tensor | None]) -> None:
        assert not self._ran, "a recorded launch has memory of its own; see Plans"
        launch = self._launch
        found = [
            (place, mask, *recording.memory(t))
            for (place, which), mask in zip(self._places, self._masks, strict=True)
            if (t := tensors[which]) is not None
        ]
        recording.launch(
            FastpathLaunch(
                launch._handle or 0,
                launch._config_ref,
                launch._slots_ref,
                tuple((place, number) for place, _, number, _ in found),
                self,
                offsets=tuple(offset for *_, offset in found),
            ),
            [mask for _, mask, *_ in found],
        )


def prepared(
    text: str, name: str, block: Block, threads: int, blocks: int, device: int
) -> Prepared:
    """A kernel of a source whose one argument is that block, launched early."""
    launch = driver.Launch(compiled.kernel(text, name, 0, device), threads, 1, [block.argument])  # type: ignore[list-item]
    launch.set_grid(blocks)
    launch.begin_early()
    return Prepared(launch, device, block.places, block.masks)


def record_block(
    recording: recorder.Recording,
    launch: driver.Launch,
    block: Any,
    places: Iterable[tuple[int, Tensor | None, int]],
    mask: int = recorder.ALIGNMENT,
) -> None:
    """Append the launch of a kernel whose first argument is a block of parameters, of which the
    tape has a copy; further arguments stay as they are.

    Args:
        block: the parameters as ctypes, with all that is no address of ``places``.
        places: where in the block the address of a tensor lies, the tensor, and how many bytes
            behind its first the address is.
        mask: the address bits that must stay as they are.
    """
    size = ctypes.sizeof(block)
    memory = (ctypes.c_char * (size + _ALIGNMENT))()
    base = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    ctypes.memmove(base, block, size)
    slots = (ctypes.c_void_p * len(launch._slots))(*launch._slots)
    slots[0] = base
    config = driver._LaunchConfig()
    ctypes.memmove(ctypes.addressof(config), launch._config_ref, ctypes.sizeof(config))
    found = [
        (ctypes.c_void_p.from_address(base + place), *recording.memory(t), more)
        for place, t, more in places
        if t is not None
    ]
    recording.launch(
        FastpathLaunch(
            launch._handle or 0,
            ctypes.addressof(config),
            ctypes.addressof(slots),
            tuple((place, number) for place, number, *_ in found),
            (memory, slots, config, launch),
            offsets=tuple(begin + more for *_, begin, more in found),
        ),
        [mask] * len(found),
    )


class Plans(dict[Any, Plan]):
    """What was prepared for each kind of call.

    A recorded call gets a plan of its own: its tape fills in the arguments without Python's lock.
    """

    def of(self, key: Any, make: Callable[[], Plan]) -> Plan:
        """The plan of that key; ``make`` makes it."""
        if recorder.active() is not None:
            return make()
        plan = self.get(key)
        if plan is None:
            if len(self) >= _MAX_PLANS:
                self.clear()
            plan = self[key] = make()
        return plan
