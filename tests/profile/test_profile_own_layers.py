"""Models that hold fastlinear's own layers are profiled and rewritten as any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastlinear as fl

LAYERS = {
    "Linear": lambda: fl.nn.Linear(16, 16, activation="relu"),
    "DiagonalLinear": lambda: fl.nn.DiagonalLinear(16),
    "MLP": lambda: fl.nn.MLP([16, 24, 16], activation="gelu"),
    "GatedMLP": lambda: fl.nn.GatedMLP(16, 24),
    "GroupedLinear": lambda: fl.nn.GroupedLinear(4, 4, 4),
}


def holding(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), LAYERS[name]())


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", LAYERS)
def test_they_are_attributed_and_left_as_they_are(name: str, mode: str) -> None:
    model = holding(name)
    hooked = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    found = fl.profile(model, (torch.randn(8, 16),), mode=mode)
    own = {r.direction for r in found.records if (r.fqn, r.module_class) == ("2", name)}
    assert own >= ({"forward", "backward"} if mode == "train" else {"forward"})
    assert [f.fqn for f in found.findings if f.code == "linear_activation"] == ["0"]
    assert [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks] == hooked


@pytest.mark.parametrize("name", LAYERS)
def test_what_stands_beside_them_is_rewritten(name: str) -> None:
    model, x = holding(name), torch.randn(8, 16)
    expected = model(x)
    result = fl.optimize_(model, (x,), config=fl.Config(min_speedup=0.01, time_budget_s=1.0))
    torch.testing.assert_close(model(x), expected)
    result.revert()
    torch.testing.assert_close(model(x), expected)
