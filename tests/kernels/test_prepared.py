"""Launches of kernels that take one block of parameters, as steps of a tape. No GPU is needed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch
from torch import Tensor

from fastlinear.fastpath import recorder
from fastlinear.kernels.cuda.prepared import record_block
from fastlinear.native import cuda_driver as driver


def test_a_tape_has_a_copy_of_the_block_and_the_other_arguments() -> None:
    block, count = (ctypes.c_uint64 * 4)(1, 2, 3, 4), ctypes.c_int(7)
    slots = (ctypes.c_void_p * 2)(ctypes.addressof(block), ctypes.addressof(count))
    config = driver._LaunchConfig()
    config.grid[:] = [5, 1, 1]
    launch = SimpleNamespace(_slots=slots, _config_ref=ctypes.addressof(config), _handle=11)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor]:
        recording, made = recorder.active(), torch.empty_like(x)
        assert recording is not None
        places = [(8, x[1:], 4), (16, None, 0), (24, made, 0)]
        record_block(recording, launch, block, places, mask=3)  # type: ignore[arg-type]
        return (made,)

    found = recorder.record(function, [torch.randn(3, 4), torch.randn(5)])
    assert found is not None
    steps, _, masks, *_ = found
    (kernel,) = [words[0] for kind, *words in steps if kind == "kernel"]
    function_, config_at, slots_at, places, _, memory = kernel
    block[0] = count.value = config.grid[0] = 9  # the block and the grid are the tape's own
    copied = (ctypes.c_void_p * 2).from_address(slots_at)
    assert function_ == 11
    assert copied[1] == ctypes.addressof(count)
    assert list((ctypes.c_uint64 * 4).from_address(copied[0] or 0)) == [1, 2, 3, 4]
    assert (copied[0] or 0) % 64 == 0  # as descriptors in a block need it
    assert driver._LaunchConfig.from_address(config_at).grid[0] == 5
    assert masks == (3, 0)
    numbers = [(at - (copied[0] or 0), tensor, offset) for _, at, tensor, offset in places]
    assert numbers == [(8, 0, 16 + 4), (24, 2, 0)]
    assert memory is not None
