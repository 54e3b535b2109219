"""Which Problems oneDNN serves."""

from __future__ import annotations

from typing import Any

import pytest

from fastlinear.families.linear.cpu import onednn
from fastlinear.families.linear.problem import problem

WHY = onednn.reason_not(problem("forward", 1, 1, 1, dtype="float32", device="cpu"))
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))


def test_reasons() -> None:
    def why(dtype: str, device: str = "cpu", **options: Any) -> str | None:
        return onednn.reason_not(problem("forward", 4, 4, 4, dtype=dtype, device=device, **options))

    assert why("float32") is None
    assert "CPU only" in str(why("float32", "cuda"))
    assert "float64" in str(why("float64"))
