"""What the one-pass backwards share: launches prepared once, for tensors of one kind.

The pass reads dy, what the forward saved, and x. Its dx leaves at once, dW and db leave as float32
shares, which a second launch adds up in order, or as they are where there is one share.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.reference import Gradients, Needs
from fastlinear.kernels.cuda.prepared import Plans, Prepared
from fastlinear.native import cuda_driver as driver

TENSORS = ("dy", "saved", "x", "dx", "weight", "dw", "db")
"""Of a pass; dw and db are those of the shares where there are several. What was saved may be
signs in place of numbers."""
_SUMS_THREADS = 256


class OnePass:
    """Prepared launches, for tensors of one kind at any address; a subclass prepares them.

    Attributes:
        MAPS: which of ``TENSORS`` the pass takes as tensor maps, its first arguments.
        POINTERS: which of them it takes as addresses, its next ones.
    """

    MAPS: ClassVar[tuple[str, ...]]
    POINTERS: ClassVar[tuple[str, ...]]

    def __init__(self, device: int) -> None:
        self._device = device
        driver.make_current(device)
        self._shares: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
        self._sums: Prepared | None = None

    def _prepare_pass(
        self,
        launch: type[driver.Launch],
        kernel: driver.Kernel,
        threads: int,
        cluster: int,
        blocks: int,
        maps: Sequence[driver.TensorMap],
        numbers: Sequence[int],
    ) -> None:
        """The pass takes ``maps``, addresses and ``numbers``."""
        pointers = [ctypes.c_void_p(0) for _ in self.POINTERS]
        values = [ctypes.c_int(number) for number in numbers]
        made = launch(kernel, threads, cluster, [*maps, *pointers, *values])
        made.set_grid(blocks)
        which = map(TENSORS.index, (*self.MAPS, *self.POINTERS))
        self._pass = Prepared(made, self._device, list(zip((*maps, *pointers), which, strict=True)))

    def _prepare_sums(
        self,
        launch: type[driver.Launch],
        kernel: driver.Kernel,
        weight: Tensor,
        needs: Needs,
        slots: int,
        at_once: int,
        numbers: Sequence[int],
    ) -> None:
        """Sums of ``slots`` shares, where there are several; a thread makes ``at_once`` of them.

        The kernel takes the addresses of the shares of dW and db, and of dW and db, then
        ``numbers`` and how many blocks make dW.
        """
        if slots <= 1 or not any(needs[1:]):
            return
        groups, n, k = weight.shape
        self._shares = (
            (slots, groups, n, k) if needs[1] else None,
            (slots, groups, n) if needs[2] else None,
        )
        threads = (
            groups * n * k // at_once if needs[1] else 0,
            groups * n // at_once if needs[2] else 0,
        )
        dw_blocks, db_blocks = (-(-count // _SUMS_THREADS) for count in threads)
        values = [ctypes.c_int(number) for number in (*numbers, dw_blocks)]
        results = [ctypes.c_void_p(0) for _ in range(4)]
        made = launch(kernel, _SUMS_THREADS, 1, [*results, *values])
        made.set_grid(dw_blocks + db_blocks)
        self._sums = Prepared(made, self._device, [(r, i) for i, r in enumerate(results)])

    def __call__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """Launch on the current stream; dx, dw and db are dense, None where not wanted."""
        parts = [
            result if shape is None else torch.empty(shape, dtype=torch.float32, device=x.device)
            for shape, result in zip(self._shares, (dw, db), strict=True)
        ]
        self._pass(dy, saved, x, dx, weight, *parts)
        if self._sums is not None:
            self._sums(*parts, dw, db)


_plans: Plans[OnePass] = Plans()


def gradients(
    make: Callable[..., OnePass],
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
    *how: Any,
) -> Gradients:
    """(dx, dW, db), each None where not needed, by launches kept for tensors of this kind.

    ``make`` makes them of everything else that is given.
    """
    groups, n, k = weight.shape
    rows = [None if t is None else t.stride() for t in (dy, saved, x)]
    of_saved = None if saved is None else saved.dtype
    key = (make, x.shape, *rows, of_saved, n, x.dtype, x.device, activation, needs, order, *how)
    plan = _plans.of(key, lambda: make(dy, saved, x, weight, activation, needs, order, *how))
    dx = layouts.empty(x.shape, order, x, x.dtype) if needs[0] else None
    dw = torch.empty((groups, n, k), dtype=x.dtype, device=x.device) if needs[1] else None
    db = torch.empty((groups, n), dtype=x.dtype, device=x.device) if needs[2] else None
    plan(dy, saved, x, weight, dx, dw, db)
    return dx, dw, db


def row_stride(t: Tensor, dense: bool) -> int:
    """Elements between tokens of t (1, M, G, features), or with ``dense`` of such a dense one."""
    _, m, groups, features = t.shape
    return groups * features if dense or m == 1 else t.stride(1)
