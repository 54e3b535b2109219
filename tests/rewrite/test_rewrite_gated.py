"""Gated MLPs: found by what they compute, measured, and reported as findings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.rules import gated as rule


class Block(nn.Module):
    """A gated MLP whose names say nothing."""

    def __init__(self, k: int = 64, h: int = 96, stacked: bool = False) -> None:
        super().__init__()
        self.p = nn.Linear(h, k)
        self.q = nn.Linear(k, 2 * h if stacked else h)
        self.r = None if stacked else nn.Linear(k, h)

    def forward(self, x: Tensor) -> Tensor:
        if self.r is None:
            gate, up = self.q(x).chunk(2, -1)
        else:
            gate, up = self.r(x), self.q(x)
        return self.p(F.silu(gate) * up)


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        assert self.r is not None
        h = F.dropout(F.silu(self.r(x)) * self.q(x), 0.5, self.training)
        return self.p(h)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(stacked=True)])
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_the_rule_names_the_halves() -> None:
    model = Model()
    found = {site.fqn: site for site in rule.match(model)}
    assert set(found) == {"layers.0", "layers.1"}
    assert found["layers.0"].gated.names == ("r", "q", "p")
    assert found["layers.1"].gated.order == "gate_up"
    assert found["layers.0"].products == "64 → 96 twice (gate, up), 96 → 64 (down)"
    assert found["layers.1"].products == "64 → 2·96 (gate and up stacked), 96 → 64 (down)"
    for site in found.values():
        assert site.sizes == (64, 96, 64)
        x = torch.randn(5, 64)
        instead = site.instead()
        assert instead is not None
        torch.testing.assert_close(instead(x), site.module(x), rtol=2e-5, atol=2e-5)
        with torch.no_grad():  # parameters are read at each call
            site.module.p.weight.mul_(2)
        torch.testing.assert_close(instead(x), site.module(x), rtol=2e-5, atol=2e-5)


def test_what_hooks_stand_upon_is_left_alone() -> None:
    model = Model()
    model.layers[0].register_forward_hook(lambda *_: None)
    model.layers[1].p.register_forward_pre_hook(lambda *_: None)
    assert rule.match(model) == []


def test_another_computation_in_training_is_none_of_ours() -> None:
    """A functional dropout shows nowhere but in training, and its rate nowhere at all."""
    for training in (False, True):
        assert rule.match(Dropping().train(training)) == []


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_findings_say_what_is_avoidable(mode: str) -> None:
    model, x = Model().train(mode == "train"), torch.randn(256, 64)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    config = fl.Config(mode=mode, tune=False, draws=1, optimizer_steps=1, time_budget_s=20.0)
    result = fl.optimize_(model, x, config=config)
    found = [f for f in result.profile.findings if f.code == "gated_mlp"]
    for f in found:  # on a noisy machine none may be measured faster
        assert f.fqn in ("layers.0", "layers.1")
        assert "gate" in f.message
        assert "fl.nn.GatedMLP.from_module" in f.message
        assert f.predicted_gain_us > 0
        passes = 2 if mode == "inference" else 5
        assert f.details["avoidable_bytes"] == passes * 256 * 96 * 4
    result.revert()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_finding_is_made_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that are given, the finding is certain."""
    from fastlinear.core.timing import Samples
    from fastlinear.rewrite.trial import gates

    def times(*_: object) -> tuple[Samples, Samples]:
        slow = Samples("before", (100.0, 101.0, 102.0), "wall", 1, "clock")
        return slow, Samples("after", (50.0, 51.0, 52.0), "wall", 1, "clock")

    monkeypatch.setattr(gates, "_times", times)
    config = fl.Config(tune=False, draws=1, time_budget_s=20.0)
    result = fl.optimize_(Model().eval(), torch.randn(16, 64), config=config)
    found = {f.fqn: f for f in result.profile.findings if f.code == "gated_mlp"}
    assert set(found) == {"layers.0", "layers.1"}
    one = found["layers.0"]
    assert one.predicted_gain_us == 50.0
    assert one.details["linears"] == ["r", "q", "p"]
    assert "101.0 us a call, 51.0 us by gated_mlp" in one.message
    assert one.flops == 2 * 16 * 3 * 64 * 96


def test_other_families_alone_are_asked_for() -> None:
    config = fl.Config(families=("linear_act",), tune=False, draws=1, time_budget_s=20.0)
    result = fl.optimize_(Model().eval(), torch.randn(16, 64), config=config)
    assert not [f for f in result.profile.findings if f.code == "gated_mlp"]
