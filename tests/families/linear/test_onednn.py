"""Which Problems oneDNN serves, and what it multiplies by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_factors_with_gaps_are_multiplied_as_dense_ones(turned: bool, dtype: torch.dtype) -> None:
    """Else oneDNN goes number by number: less exact in float32, and a hundred times as long."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bfloat16 path on this processor")
    generator = torch.Generator().manual_seed(0)

    def gapped(rows: int, columns: int) -> torch.Tensor:
        size = (columns, 2 * rows) if turned else (rows, 2 * columns)
        made = torch.randn(size, generator=generator).to(dtype)
        return made[:, :rows].t() if turned else made[:, :columns]

    weight, x = gapped(20, 872), gapped(872, 24)
    rows, dpre = torch.randn(18, 872).to(dtype), torch.randn(872, 20).to(dtype)

    def products(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        y, _ = onednn.forward(rows, weight, None, "none", False)
        return [y, onednn.grad_input(dpre, weight), onednn.grad_weight(dpre, x)]

    dense = products(weight.contiguous(), x.contiguous())
    assert all(map(torch.equal, products(weight, x), dense))
