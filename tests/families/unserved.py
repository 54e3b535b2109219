"""Why kernels of unequal_linear do not serve a dtype on this machine's CPU, for tests to skip."""

from __future__ import annotations

import torch

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.families.grouped.unequal.backends import FAMILY, problem


def unserved(dtype: torch.dtype) -> str | None:
    """The reason, or None; compiles the library at first."""
    (backend,) = [b for b in FAMILY.candidates("forward") if b.name == "together"]
    p = problem("forward", 4, 2, 4, 4, dtype=DTYPE_NAMES[dtype], device="cpu")
    return backend.why_not_ready(p)
