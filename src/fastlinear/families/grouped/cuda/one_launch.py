"""What the forwards in CUDA C++ share: a launch prepared once, for tensors of one kind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.sign_mask import AnyPlace
from fastlinear.kernels.cuda import hopper
from fastlinear.kernels.cuda.prepared import Place, Plans, Prepared
from fastlinear.native import cuda_driver as driver

TENSORS = ("x", "weight", "bias", "y", "pre")
"""Of a launch; pre may be the signs of y in its place."""


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
        values = [ctypes.c_int(number) for number in numbers]
        launch = hopper.EarlyLaunch(kernel, threads, 1, [*maps, *pointers, *values])
        launch.set_grid(blocks)
        which = map(TENSORS.index, (*self.MAPS, *self.POINTERS))
        arguments: list[Place] = [*maps, *pointers]
        places = list(zip(arguments, which, strict=True))
        self.launch = Prepared(launch, self._device, places)


_plans: Plans[OneLaunch] = Plans()


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
    plan = _plans.of(key, lambda: make(x, weight, bias, *how))
    y = layouts.empty((*x.shape[:3], n), order, x, x.dtype)
    pre = torch.empty_like(y) if save_pre else None
    if sign_mask is not None:
        pre = x.new_empty(sign_mask.shape, dtype=torch.uint8)
    plan.launch(x, weight, bias, y, pre)
    return y, pre
