"""Diagonal modules: found by what they compute, measured, and reported as findings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.rules import diagonal as rule


class LayerScale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PseudoLinear(nn.Module):
    """The document's: the bias is listed first here, so that names say nothing."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(features))
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.scale + self.shift)


class InPlace(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma)


class Softmax(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * self.gamma, -1)


class Needy(LayerScale):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x * self.gamma + other


def diagonal(features: int) -> nn.Linear:
    linear = nn.Linear(features, features)
    with torch.no_grad():
        linear.weight.copy_(torch.diag(torch.randn(features)))
    return linear


class Model(nn.Module):
    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.branch = nn.Linear(features, features)
        self.ls1 = LayerScale(features)
        self.fake = PseudoLinear(features)
        self.diagonal = diagonal(features)
        self.norm = nn.LayerNorm(features)
        self.prelu = nn.PReLU(features)
        self.others = nn.ModuleList([InPlace(features), Softmax(features), Needy(features)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.branch(self.norm(x)))
        return self.prelu(self.diagonal(self.fake(x)))


def test_modules_are_known_by_what_they_compute() -> None:
    found = {d.fqn: d for d in rule.match(Model())}
    assert sorted(found) == ["diagonal", "fake", "ls1"]
    scale, fake, linear = found["ls1"], found["fake"], found["diagonal"]
    assert (scale.kind, scale.activation, scale.weight, scale.bias) == (
        *("layer_scale", "none", "gamma"),
        None,
    )
    assert (fake.kind, fake.activation, fake.weight, fake.bias) == (
        *("affine", "relu", "scale"),
        "shift",
    )
    assert (linear.kind, linear.weight, linear.bias) == ("linear", "weight", "bias")
    assert [d.features for d in (scale, fake, linear)] == [64, 64, 64]


def test_what_is_put_instead_computes_the_same() -> None:
    model = Model()
    with torch.no_grad():
        for parameter in (model.ls1.gamma, model.fake.scale, model.fake.shift):
            parameter.normal_()
    x = torch.randn(5, 64)
    for d in rule.match(model):
        torch.testing.assert_close(d.instead()(x), d.module(x))


def test_matching_changes_nothing() -> None:
    model = Model().bfloat16()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    assert len(rule.match(model)) == 3
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p._version for p in model.parameters()] == versions


def test_hooked_modules_and_nearly_diagonal_linears_are_left_out() -> None:
    model = Model()
    model.ls1.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        model.diagonal.weight[0, 1] = 1e-30
    assert [d.fqn for d in rule.match(model)] == ["fake"]


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_optimize_reports_what_it_would_save(mode: str) -> None:
    """A full product with a diagonal is the slowest way there is; nothing is rewritten for it."""
    model = nn.Sequential(diagonal(512), nn.Tanh(), LayerScale(512))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    config = fl.Config(mode=mode, tune=False, time_budget_s=5.0)
    result = fl.optimize_(model, torch.randn(256, 512), config=config)
    found = {f.fqn: f for f in result.findings if f.code == "diagonal_linear"}
    assert "0" in found
    finding = found["0"]
    assert finding.details["advice"] == "fl.nn.DiagonalLinear.from_linear(module)"
    assert finding.predicted_gain_us > 0
    assert finding.measured_us > finding.floor_us > 0
    assert "exactly diagonal: 512 numbers" in finding.message
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    result.to_json()
    result.revert()


def test_families_that_are_off_are_not_looked_for() -> None:
    model = nn.Sequential(diagonal(512))
    config = fl.Config(families=("linear_act",), tune=False)
    result = fl.optimize_(model, torch.randn(256, 512), config=config)
    assert not [f for f in result.findings if f.code == "diagonal_linear"]
