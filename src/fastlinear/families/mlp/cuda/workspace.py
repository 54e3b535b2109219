"""Launches of ``whole_cuda`` whose blocks wait for one another over global memory.

All blocks of such a launch must run at once: it is cooperative, and the driver starts it only when
there is room for every block. Published activations lie in a workspace of the library's own, one
for each stream and for each CUDA graph that is recorded: launches that share one must follow one
another. It is set up when it is made; afterwards every launch leaves it ready for the next,
whatever that computes. A launch that fails on the device leaves a CUDA context that cannot be used
any more, workspaces included.

Workspaces are kept as long as the process lives, because a recorded graph may be replayed at any
time: two sets of what all layers but the last publish, 1.8 MB for 8 layers of width 1024 and 64
rows in bfloat16, 7.3 MB for width 4096.
"""

from __future__ import annotations

import ctypes

import torch

from fastlinear.native import cuda_driver as driver

__all__ = ["make_cooperative", "workspace"]

_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE

_workspaces: dict[tuple[object, ...], int] = {}


def make_cooperative(launch: driver.Launch) -> None:
    """All blocks of the launch run at once, or it does not start."""
    attributes = (driver._LaunchAttribute * 2)()
    attributes[0] = launch._attribute
    attributes[1].id = _COOPERATIVE
    attributes[1].value[0] = 1
    launch._attributes = attributes  # type: ignore[attr-defined]
    launch._config.attributes = ctypes.cast(attributes, ctypes.POINTER(driver._LaunchAttribute))
    launch._config.attribute_count = 2


def workspace(device: int, stream: int, geometry: object, exchange_bytes: int, blocks: int) -> int:
    """Address of the memory that launches of one geometry on ``stream`` share.

    ``exchange_bytes`` of published activations, then a counter for each block. Launches recorded
    into a graph share one of their own. The device must be the current one.
    """
    capture = _capture(stream) if torch.cuda.is_current_stream_capturing() else 0
    key = (device, stream, capture, geometry)
    address = _workspaces.get(key)
    if address is None:
        address = _workspaces[key] = _new_workspace(exchange_bytes, blocks)
    return address


def _capture(stream: int) -> int:
    """Identity of the capture that ``stream`` takes part in."""
    status, identity = ctypes.c_int(), ctypes.c_ulonglong()
    driver._check(
        driver._driver().cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(identity), None, None, None
        ),
        "cuStreamGetCaptureInfo",
    )
    return identity.value


def _new_workspace(exchange_bytes: int, blocks: int) -> int:
    """Device memory of the current device: empty exchange buffers, then a zero for each block.

    Made outside any capture under way, and ready when this returns.
    """
    lib = driver._driver()
    address, stream = ctypes.c_uint64(), ctypes.c_void_p()
    with driver.loading_allowed():
        driver._check(
            lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(exchange_bytes + 4 * blocks)),
            "cuMemAlloc",
        )
        driver._check(lib.cuStreamCreate(ctypes.byref(stream), 1), "cuStreamCreate")
        for offset, value, words in (
            (0, 0xFFFFFFFF, exchange_bytes // 4),
            (exchange_bytes, 0, blocks),
        ):
            driver._check(
                lib.cuMemsetD32Async(
                    ctypes.c_uint64(address.value + offset),
                    ctypes.c_uint(value),
                    ctypes.c_size_t(words),
                    stream,
                ),
                "cuMemsetD32Async",
            )
        driver._check(lib.cuStreamSynchronize(stream), "cuStreamSynchronize")
        driver._check(lib.cuStreamDestroy_v2(stream), "cuStreamDestroy")
    return address.value
