"""Copies into and out of the buffers of a CUDA graph, at the least host time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


@cache
def _memcpy() -> Callable[..., int]:
    """``cuMemcpyDtoDAsync``: a third of the host time of ``Tensor.copy_``."""
    function = ctypes.PyDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return function


class Copy:
    """Copies tensors of one kind to and from ``static``, a buffer of a graph.

    Args:
        static: the buffer, or a view of its first rows.
        plain: whether all that will be copied has ``static``'s dtype, device and strides, dense.
    """

    def __init__(self, static: Tensor, plain: bool) -> None:
        self.static = static
        self._address, self._bytes = static.data_ptr(), static.numel() * static.element_size()
        self._device = static.device.index
        self._plain = plain and static.is_cuda and self._bytes > 0

    def fill(self, source: Tensor) -> None:
        """``source``'s values into the buffer; nothing to do where it is the buffer itself."""
        address = source.data_ptr()
        if address == self._address:
            return
        if not self._plain or _memcpy()(
            self._address, address, self._bytes, torch._C._cuda_getCurrentRawStream(self._device)
        ):  # a thread that has no CUDA context yet: torch gives it one
            self.static.copy_(source)

    def fresh(self) -> Tensor:
        """A new tensor with the buffer's values."""
        if not self._plain:
            return self.static.clone()
        new = torch.empty_like(self.static)
        if _memcpy()(
            new.data_ptr(),
            self._address,
            self._bytes,
            torch._C._cuda_getCurrentRawStream(self._device),
        ):
            new.copy_(self.static)
        return new


def is_dense(t: Tensor) -> bool:
    """Whether the tensor's elements fill one stretch of memory, in any order."""
    return t.is_contiguous() or torch.empty_like(t, device="meta").stride() == t.stride()
