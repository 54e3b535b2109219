"""Single launches of diagonal_linear's forward, as the compiled door runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

_ALIGNMENT = 15  # address bits that a kernel was made for


def in_door(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    fallback: Callable[..., Tensor],
) -> Any:
    """The door's tuple for the forward of such CUDA tensors, or None where one launch is not all.

    It must have run on them before. The door numbers x, weight, bias and residual 0 to 3.
    ``fallback`` serves calls of otherwise aligned addresses.
    """
    from fastlinear.ops.diagonal_linear import triton

    given = [t for t in (x, residual) if t is not None]
    if any(t.dim() != 2 and not t.is_contiguous() for t in given):
        return None
    k = x.shape[-1]
    rows = None if residual is None else residual.view(-1, k)
    launch = triton.door_launch(x.view(-1, k), weight, bias, activation, rows)
    if launch is None:
        return None
    return replace(launch, masks=(_ALIGNMENT,) * 4).plan(fallback, k)
