"""Ceilings that cost nothing, so that diagnosis can be tested without measuring a machine."""

from __future__ import annotations

import pytest

from fastlinear.core.cost import Ceilings
from fastlinear.profile import clock


@pytest.fixture(autouse=True)
def fixed_ceilings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 Gflop/s and 10 GB/s, except where a real device is under test."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(clock, "measure_ceilings", lambda *_: Ceilings(2e11, 1e10))
