"""Ceilings that cost nothing, so that diagnosis can be tested without measuring a machine."""

from __future__ import annotations

import pytest

from fastlinear.core.cost import Ceilings
from fastlinear.profile import capture


@pytest.fixture(autouse=True)
def fixed_ceilings(monkeypatch: pytest.MonkeyPatch) -> Ceilings:
    """200 Gflop/s and 10 GB/s."""
    ceilings = Ceilings(2e11, 1e10)
    monkeypatch.setattr(capture, "measure_ceilings", lambda *_: ceilings)
    return ceilings
