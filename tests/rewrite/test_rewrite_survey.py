"""fl.profile: the findings of optimize_, with nothing rewritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import InputError
from fastlinear.profile.report import ProfileReport
from fastlinear.rewrite import registry
from tests.rewrite.grouped_models import FAST, Attention, Heads, Loop
from tests.rewrite.list_models import TOGETHER, Listed, own


class GLU(nn.Module):
    """down(act(gate(x)) * up(x)), alone or amid other work."""

    def __init__(self, activation: Any, amid: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)
        self.activation, self.amid = activation, amid

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return x + y if self.amid else y


class Decides(GLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() < 1e9 else x


def state(model: nn.Module) -> list[Any]:
    return [dict(vars(m)) for m in model.modules()]


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("amid", [True, False])
@pytest.mark.parametrize(("name", "act"), [("silu", F.silu), ("gelu", F.gelu)])
def test_gated_mlps_are_findings(
    name: str, act: Any, amid: bool, mode: str, finding_times: Any
) -> None:
    finding_times((100.0,) * 3, (60.0,) * 3)
    model = nn.Sequential(nn.Linear(32, 32), GLU(act, amid))
    before = state(model)
    report = fl.profile(model, torch.randn(20, 32), mode, steps=1)
    (found,) = [f for f in report.findings if f.code == "gated_mlp"]
    assert (found.fqn, found.title) == ("1", f"gated MLP of 96 hidden features, {name}")
    assert found.predicted_gain_us > 0
    assert found.measured_us <= report.step_us * (1 + 1e-9)
    assert "optimize_ puts it in place by itself where the step gains" in found.message
    shown = " ".join(report.table(width=200).split())
    assert shown.index("Unattributed") < shown.index("Slowest modules") < shown.index("gated MLP")
    assert f"1: gated MLP of 96 hidden features, {name}. products 32 → 96 twice" in shown
    pairs = [f for f in report.findings if f.code == "linear_activation"]
    assert all(f.part_of == "1" for f in pairs), "its gain is counted once"
    assert state(model) == before
    assert all("forward" not in vars(m) for m in model.modules())


def test_one_that_is_not_rewritten_says_why(finding_times: Any) -> None:
    finding_times((100.0,) * 3, (60.0,) * 3)
    report = fl.profile(Decides(F.silu), torch.randn(20, 32), steps=1)
    (found,) = [f for f in report.findings if f.code == "gated_mlp"]
    assert "decides by a tensor's values" in found.message
    assert "puts it in place" not in found.message


@pytest.mark.parametrize(
    ("make", "x", "title"),
    [
        (lambda: Loop(16, 4), lambda: torch.randn(9, 64), "16 groups of 4 to 4 features"),
        (Heads, lambda: torch.randn(9, 8), "4 linears of 8 features on one input"),
        (Attention, lambda: torch.randn(2, 5, 16), "3 linears of 16 features on one input"),
    ],
)
def test_layers_that_could_be_one_are_findings(make: Any, x: Any, title: str, clock: Any) -> None:
    clock(FAST)
    report = fl.profile(nn.Sequential(make()), x(), steps=1)
    (found,) = [f for f in report.findings if f.code == "grouped_linear"]
    assert found.title == title
    assert "optimize_ puts it in place by itself" in found.message
    assert found.advice is not None


@pytest.mark.skipif(not TOGETHER, reason="unequal_linear has no kernels here")
def test_lists_of_linears_are_findings(clock: Any) -> None:
    clock(FAST)
    report = fl.profile(Listed(), (own(),), steps=1)
    (found,) = [f for f in report.findings if f.code == "grouped_linear"]
    assert found.title == "5 linears of different sizes on inputs of their own"
    assert found.advice is not None
    assert found.advice.startswith("fl.unequal_linear(xs, [m.weight for m in model.layers]")
    assert "optimize_ puts it in place by itself" in found.message


def test_arguments_are_checked_as_ever() -> None:
    with pytest.raises(InputError, match=r"fastlinear\.profile: expected mode in"):
        fl.profile(nn.Linear(2, 2), torch.ones(1, 2), "inferrence")
    with pytest.raises(InputError, match="steps of at least 1"):
        fl.profile(nn.Linear(2, 2), torch.ones(1, 2), steps=0)
    with pytest.raises(InputError, match=r"fastlinear\.profile"):
        fl.profile(nn.Linear(2, 2), torch.ones(1, 3))


def test_all_stages_are_told() -> None:
    told: list[tuple[str, int, int]] = []
    report = fl.profile(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        torch.ones(4, 8),
        steps=1,
        progress=lambda *stage: told.append(stage),
    )
    assert isinstance(report, ProfileReport)
    rules = len(registry.RULES)
    assert told[-1] == ("findings", rules, rules)


def test_the_random_state_is_left_as_it_was() -> None:
    model = nn.Sequential(GLU(F.silu), nn.Dropout(0.5))
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    fl.profile(model, torch.ones(4, 32), "train", steps=1)
    assert torch.equal(torch.randn(4), expected)
