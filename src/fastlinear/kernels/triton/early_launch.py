"""Launches that begin while the kernel before them ends: programmatic dependent launch, sm_90.

Such a kernel waits for the end of the one before it before it reads or writes anything, so that
what runs beside it is its own start only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace

import torch

from fastlinear.core.device import device_facts
from fastlinear.fastpath.launch import FastpathLaunch
from fastlinear.kernels.triton.launch import Launch, Place
from fastlinear.native import cuda_driver

_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def begins_early(device: torch.device) -> bool:
    """Whether kernels on a device may begin before the end of the one before them."""
    return device.type == "cuda" and device_facts(device).capability >= (9, 0)


class EarlyLaunch(Launch):
    """A ``Launch`` whose kernel waits for the one before it itself, where the device lets it.

    The compiled fast path launches it early; launches from Python wait in the stream.
    """

    __slots__ = ()

    def in_fastpath(
        self, tensors: tuple[Place, ...], described: Mapping[int, torch.Tensor] | None = None
    ) -> FastpathLaunch | None:
        """As ``Launch.in_fastpath``, with the attribute."""
        found = super().in_fastpath(tensors, described)
        device = self._device
        if found is None or device is None or not begins_early(torch.device("cuda", device)):
            return found
        config = cuda_driver._LaunchConfig.from_address(found.config)
        attributes = (cuda_driver._LaunchAttribute * 1)()
        attributes[0].id = _PROGRAMMATIC_SERIALIZATION
        attributes[0].value[0] = 1
        config.attributes = ctypes.cast(attributes, ctypes.POINTER(cuda_driver._LaunchAttribute))
        config.attribute_count = 1
        return replace(found, memory=(found.memory, attributes))
