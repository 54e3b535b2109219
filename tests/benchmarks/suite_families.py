"""What tests of the suite share: families that are small or broken, and quick ways to measure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.suite.family import Family
from benchmarks.suite.measure import How
from benchmarks.suite.work import ASKED
from fastlinear.core.cost import Ceilings
from fastlinear.profile import clock as profile_clock
from fastlinear.rewrite.evaluate import findings

QUICK = How(skip=("compile", ASKED), seconds=0.5, rounds=5, timed_s=0.1)
CPU = torch.device("cpu")


def small() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(32, 8)


def raising() -> tuple[nn.Module, Tensor]:
    raise ValueError("no such widths")


SMALL, RAISING = Family("small", "tests", small), Family("raising", "tests", raising)


def set_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring what the machine can do takes seconds and decides nothing here."""
    for module, name in ((profile_clock, "ceilings"), (findings, "measure_ceilings")):
        monkeypatch.setattr(module, name, lambda *_: Ceilings(1e11, 1e10))
