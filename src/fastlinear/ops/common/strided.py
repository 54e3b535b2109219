"""Which tensors hold their numbers where kernels and views find them."""

from __future__ import annotations

import torch
from torch import Tensor

REMEDY = "Make it dense, for example with t.to_dense(), or of a nested tensor with its values."


def unlike_strided(t: Tensor) -> str | None:
    """What a tensor is that has no strides, in words; None for one that has."""
    if t.layout is torch.strided:
        return "a nested tensor" if t.is_nested else None
    return f"a tensor of layout {t.layout}"
