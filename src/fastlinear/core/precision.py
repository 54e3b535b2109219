"""Which dtypes are served and which float32 schemes the user allows."""

from __future__ import annotations

from typing import Any

import torch

FLOAT_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes every family accepts, by name."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


# torch.backends.*.matmul.fp32_precision in the words of set_float32_matmul_precision
_SCHEMES = {"tf32": "high", "bf16": "medium"}


def float32_precision() -> str:
    """``"highest"``, ``"high"`` or ``"medium"``: what the user allows float32 products.

    ``torch.get_float32_matmul_precision()``. That raises once a backend's ``fp32_precision`` has
    been set; then the loosest scheme of CUDA's and oneDNN's products tells.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backends: Any = torch.backends
        products = (backends.cuda.matmul, backends.mkldnn.matmul)
        named = {_SCHEMES.get(product.fp32_precision, "highest") for product in products}
        return next(word for word in ("medium", "high", "highest") if word in named)


def matmul_precision(dtype: torch.dtype) -> str:
    """``float32_precision()`` for float32, else ``"n/a"``: only float32 problems have one."""
    return float32_precision() if dtype is torch.float32 else "n/a"
