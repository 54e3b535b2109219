"""Which dtypes are served and which float32 schemes the user allows."""

from __future__ import annotations

import torch

FLOAT_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes every family accepts, by name."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


def matmul_precision(dtype: torch.dtype) -> str:
    """The float32 rule in force: ``"highest"``, ``"high"``, ``"medium"``, or ``"n/a"``.

    Only float32 problems have one; it comes from ``torch.get_float32_matmul_precision()``.
    """
    return torch.get_float32_matmul_precision() if dtype is torch.float32 else "n/a"


def allows_tf32(precision: str) -> bool:
    """Whether TF32-class schemes may serve a float32 problem under this precision."""
    return precision in ("high", "medium")
