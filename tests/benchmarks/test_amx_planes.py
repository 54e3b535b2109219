"""The study of float32 products by AMX: right numbers, and what it refuses."""

from __future__ import annotations

import pytest

from benchmarks.experiments.amx_planes import __main__ as study
from fastlinear.kernels.cpu.grouped import half_products


@pytest.mark.skipif(half_products() != "tiles", reason="needs a processor with AMX")
@pytest.mark.parametrize("size", [(32, 512, 64), (288, 1024, 32)])
def test_six_products_of_planes_are_as_accurate_as_pytorch(size: tuple[int, int, int]) -> None:
    row = study.measured(*size, rounds=1)
    assert row["errors"]["planes"] <= 2 * row["errors"]["torch"]


@pytest.mark.parametrize("size", [(33, 512, 32), (32, 100, 32)])
def test_other_sizes_are_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(SystemExit, match=r"amx_planes: (M and N in 32s|a processor with AMX)"):
        study.measured(*size, rounds=1)
