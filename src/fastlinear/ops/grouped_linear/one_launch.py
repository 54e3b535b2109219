"""What the forwards in CUDA C++ share: a launch prepared once, for tensors of one kind."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common import hopper
from fastlinear.ops.common.fastpath_launch import prepared
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.operands import Forward
from fastlinear.ops.grouped_linear.sign_mask import AnyPlace

TENSORS = ("x", "weight", "bias", "y", "pre")
"""Of a launch; pre may be the signs of y in its place."""
_MAX_PLANS = 1024


class OneLaunch:
    """A prepared launch, for tensors of one kind at any address; a subclass prepares it.

    It may begin while the launch before it ends, for which its kernel waits before it reads.

    Attributes:
        MAPS: which of ``TENSORS`` the kernel takes as tensor maps, its first arguments.
        POINTERS: which of them it takes as addresses, its next ones.
    """

    MAPS: ClassVar[tuple[str, ...]]
    POINTERS: ClassVar[tuple[str, ...]]

    def __init__(self, device: int) -> None:
        self._device = device
        driver.make_current(device)
        self._lock = threading.Lock()

    def _prepare(
        self,
        kernel: driver.Kernel,
        threads: int,
        blocks: int,
        maps: Sequence[driver.TensorMap],
        numbers: Sequence[int],
    ) -> None:
        """The kernel takes ``maps``, addresses and ``numbers``."""
        pointers = [ctypes.c_void_p(0) for _ in self.POINTERS]
        places = zip(maps, map(TENSORS.index, self.MAPS), strict=True)
        self._maps = [(m, i) for m, i in places if not isinstance(m, driver.NoTensorMap)]
        self._pointers = list(zip(pointers, map(TENSORS.index, self.POINTERS), strict=True))
        values = [ctypes.c_int(number) for number in numbers]
        arguments: list[driver.Argument] = [*maps, *pointers, *values]
        self._launch = hopper.EarlyLaunch(kernel, threads, 1, arguments)
        self._launch.set_grid(blocks)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch with ``TENSORS`` on the current stream; y and pre are dense."""
        if self._device != torch._C._cuda_getDevice():
            with torch.cuda.device(self._device):
                self(*tensors)
            return
        with self._lock:
            for map_, which in self._maps:
                tensor = tensors[which]
                if tensor is not None:
                    map_.point_at(tensor.data_ptr())
            for pointer, which in self._pointers:
                tensor = tensors[which]
                pointer.value = 0 if tensor is None else tensor.data_ptr()
            self._launch.run(torch._C._cuda_getCurrentRawStream(self._device))

    def steps(self, call: Forward) -> tuple[int, int | None]:
        """Add a call to its tape; the launch is that tape's from then on."""
        y, pre = call.results()
        numbers = (*call.numbers, y, pre)
        maps = [(map_, numbers[which]) for map_, which in self._maps]
        pointers = [(pointer, numbers[which]) for pointer, which in self._pointers]
        call.tape.launch(prepared(self._launch, [*maps, *pointers], self))
        return y, pre


_plans: dict[Any, OneLaunch] = {}


def results(
    make: Callable[..., OneLaunch],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    order: str,
    config: Any,
    sign_mask: AnyPlace | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y and the pre-activation, signs of y or None, by a launch kept for tensors of this kind.

    ``make`` makes it of everything that is given before ``signs``.
    """
    n = weight.shape[1]
    how = activation, save_pre, order, config
    key = (make, x.shape, x.stride(), n, x.dtype, x.device, bias is None, *how)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = make(x, weight, bias, *how)
    y = layouts.empty((*x.shape[:3], n), order, x, x.dtype)
    pre = torch.empty_like(y) if save_pre else None
    if sign_mask is not None:
        pre = x.new_empty(sign_mask.shape, dtype=torch.uint8)
    plan(x, weight, bias, y, pre)
    return y, pre
