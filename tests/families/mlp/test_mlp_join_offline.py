"""The kernel that joins matrices compiles for each architecture without spilling, without a GPU."""

from __future__ import annotations

import pytest
import torch

from fastlinear.families.mlp import join
from tests.families.triton_offline import Recorded, assert_fits, dumped, recorder


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [(63, 256), (256, 63), (64, 256), (3, 129), (1, 1)], ids=str)
def test_every_kind_of_reads(
    columns: tuple[int, int], dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Recorded] = []
    monkeypatch.setattr(join, "Launch", recorder(made))
    join._plans.clear()
    a, b = (torch.empty(1000, n, dtype=dtype, device="meta") for n in columns)
    y = join._joined(a, b)
    join._plans.clear()
    assert y.shape == (1000, sum(columns))
    (launch,) = made
    compiled = launch.compile(arch)
    assert assert_fits(compiled, 32_768).registers <= 128
    if columns == (63, 256):  # words read side by side, 16 bytes written
        stored = [line for line in dumped(compiled, "-sass").splitlines() if " STG" in line]
        assert stored
        assert all("STG.E.128" in line for line in stored)
