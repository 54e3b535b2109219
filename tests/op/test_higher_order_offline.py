"""The Triton passes of second and third derivatives compile without spilling."""

from __future__ import annotations

import pytest
import torch

from fastlinear.activations.reference import SMOOTH
from fastlinear.kernels.triton import elementwise
from tests.families.triton_offline import FLOATS, Recorded, assert_fits, recorder


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(SMOOTH))
def test_passes(name: str, dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorded] = []
    monkeypatch.setattr(elementwise, "Launch", recorder(made))
    monkeypatch.setattr(elementwise, "_plans", {})
    a = torch.empty(1000, 128, dtype=dtype, device="meta")
    elementwise.second(name, a, a, a)
    elementwise.third(name, a, a, a, a, a)
    assert len(made) == 2
    for launch in made:
        assert_fits(launch.compile(arch), 1024)
