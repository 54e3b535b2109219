"""How the backends of ragged_linear want tensors to lie."""

from __future__ import annotations

from torch import Tensor


def has_rows(t: Tensor) -> bool:
    """Whether a matrix has contiguous rows that do not overlap."""
    return t.stride(1) == 1 and t.stride(0) >= t.shape[1]


def with_rows(t: Tensor) -> Tensor:
    """t, or a copy with contiguous rows."""
    t = t.resolve_neg()
    return t if has_rows(t) else t.contiguous()
