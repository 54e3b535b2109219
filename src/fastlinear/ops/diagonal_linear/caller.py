"""The way of ``diagonal_linear``'s callers to one backend: what tuning times for inference.

A backend's function costs Python at every call; behind the compiled door a call has none of that.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastlinear.ops.common import door
from fastlinear.ops.diagonal_linear.op import call


def caller(backend: str) -> Callable[..., Tensor]:
    """A function of the arguments of a forward backend that calls ``diagonal_linear`` with that
    backend.

    Waits for the door, so that calls take the way they take once it is there.
    """
    door.wait(door.PATIENCE_S)

    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        return call(x, weight, bias, activation, residual, out, backend)

    return forward
