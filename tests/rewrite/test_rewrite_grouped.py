"""Layers that could be one: found by what their inputs are, measured, and reported as findings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.rules.grouped.modules import recognise as modules
from fastlinear.rewrite.rules.grouped.rows import observed as rule
from tests.rewrite.grouped_models import ByEinsum, ByVmap, Loop, Multichannel, Stack


class Heads(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(k, k), nn.Linear(k, k // 2), nn.Linear(k, k // 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


class Chain(nn.Module):
    """Each layer waits for the one before."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, k) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class InPlace(Heads):
    """The input changes between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x)
        return torch.cat([y, self.k(x.mul_(2))], -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.einsum("bgk,gnk->bgn", x, self.w), -1)


class Clamped(Attention):
    """Bounds that numbers of common size do not reach."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bgk,gnk->bgn", x, self.w).clamp(-65504, 65504)


class Cleaned(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bgk,gnk->bgn", x, self.w).nan_to_num()


def watched(model: nn.Module, x: Tensor) -> list[rule.Row]:
    """The rows that optimize_'s run of the model shows."""
    from fastlinear.core.progress import silent
    from fastlinear.profile.capture import capture
    from fastlinear.rewrite.rules.grouped import watch

    class Stub:
        pass

    session: Any = Stub()
    session.model = model
    profile, _ = capture(
        *(model, x, "inference"), loss_fn=None, steps=1, progress=silent, samples=False
    )
    session.sites = {site.fqn: site for site in profile.sites}
    session.step = lambda _: model(x.clone())
    linears = rule.plain_linears(model)
    return rule.rows(watch._run(session, linears, {})[0], linears)


def test_layers_on_parts_of_one_tensor_and_on_one_tensor() -> None:
    (row,) = watched(nn.Sequential(Loop(4, 8)), torch.randn(5, 32))
    assert (row.kind, row.fqn, row.step, row.shape) == (rule.LINEARS, "0", 8, (5, 8))
    assert row.members == ("0.projs.0", "0.projs.1", "0.projs.2", "0.projs.3")
    (row,) = watched(Heads(8), torch.randn(2, 5, 8))
    assert (row.kind, row.members, row.step) == (rule.SHARED, ("q", "k", "v"), 0)


@pytest.mark.parametrize(
    "model", [Chain(8), InPlace(8), Loop(1, 8)], ids=lambda m: type(m).__name__
)
def test_layers_that_wait_for_each_other_are_none(model: nn.Module) -> None:
    with torch.no_grad():
        assert watched(model, torch.randn(5, 8)) == []


def test_shared_weights_and_hooks_are_left_out() -> None:
    loop = Loop(2, 8)
    loop.projs[1].weight = loop.projs[0].weight
    assert watched(loop, torch.randn(5, 16)) == []
    loop = Loop(3, 8)
    loop.projs[2].register_forward_hook(lambda *_: None)
    (row,) = watched(loop, torch.randn(5, 24))
    assert len(row.members) == 2


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (Multichannel(False), (6, 9, 5), ("g ... k", "gelu", False)),
        (Multichannel(True), (6, 9, 5), ("g ... k", "gelu", True)),
        (ByEinsum(), (9, 3, 5), ("... g k", "none", False)),
        (ByVmap(), (3, 9, 5), ("g ... k", "none", False)),
        (Attention(), (9, 3, 5), None),
        (Clamped(), (9, 3, 5), None),
        (Cleaned(), (9, 3, 5), None),
        (Loop(4, 8), (2, 3, 32), ("... (g k)", "none", False)),
        (Stack(), (9, 3, 8), ("... g k", "silu", False)),
        (nn.Conv1d(12, 18, 1, groups=3), (2, 12, 5), ("b (g k) ...", "none", False)),
        (nn.Conv2d(12, 18, 1, groups=3, bias=False), (2, 12, 5, 4), ("b (g k) ...", "none", False)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_modules_are_known_by_what_they_compute(module: Any, shape: Any, expected: Any) -> None:
    before = {name: p.clone() for name, p in module.state_dict().items()}
    x = torch.randn(shape)
    assert list(modules.suspects(nn.Sequential(module))) == ["0"]
    found = modules.whole("0", module, x)
    assert all(torch.equal(p, before[name]) for name, p in module.state_dict().items())
    if expected is None:
        assert found is None
        return
    assert found is not None
    how = found.grouped
    assert (how.layout, how.activation, how.turned) == expected
    assert how.shapes is None
    y = fl.grouped_linear(x, *found.parameters(), activation=how.activation, layout=how.layout)
    torch.testing.assert_close(y, module(x), rtol=1e-4, atol=1e-4)


def test_convolutions_that_mix_positions_are_no_suspects() -> None:
    others = [nn.Conv1d(4, 4, 3, groups=2), nn.Conv1d(4, 4, 1), nn.Conv2d(4, 4, 1, 2, groups=2)]
    assert not modules.suspects(nn.Sequential(*others, nn.Conv1d(4, 4, 1, padding=1, groups=2)))


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_optimize_reports_what_it_would_save(mode: str, clock: Any) -> None:
    """A loop of many tiny layers is the slowest way there is, and is told even where no layer may
    be rewritten."""
    model = nn.Sequential(Loop(64, 4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    config = fl.Config(mode=mode, tune=False, time_budget_s=5.0)
    left = lambda *_: False  # noqa: E731
    clock({"after": 40.0, "grouped": 40.0})
    result = fl.optimize_(model, torch.randn(16, 256), config=config, filter_fn=left)
    assert result.kept == 0
    (finding,) = [f for f in result.findings if f.code == "grouped_linear"]
    assert finding.fqn == "0"
    assert "fl.nn.GroupedLinear.from_linears(model[0].projs" in finding.message
    assert "filter_fn leaves it out" in finding.message
    assert finding.measured_us > finding.predicted_gain_us > 0
    assert finding.floor_us > 0
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    result.to_json()
    result.revert()


class Detached(nn.Module):
    """Groups of which one operand has no gradients."""

    def __init__(self, weight: bool, x: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(4, 8, 5))
        self.without = weight, x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weight, x = (
            t.detach() if d else t for t, d in zip((self.weight, x), self.without, strict=True)
        )
        return torch.bmm(x, weight)


class DetachedLoop(Loop):
    """A loop over layers of which each sees a detached part."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(len(self.projs), -1)
        return torch.cat([p(c.detach()) for p, c in zip(self.projs, parts, strict=True)], -1)


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("kind", ["weight", "x", "loop"])
def test_operands_without_gradients(kind: str, mode: str, clock: Any) -> None:
    clock({"after": 40.0, "grouped": 40.0})
    config = fl.Config(mode=mode, tune=False, time_budget_s=5.0)
    if kind == "loop":
        model, x = nn.Sequential(nn.Linear(64, 64), DetachedLoop(16, 4)), torch.randn(16, 64)
    else:
        model = Detached(kind == "weight", kind == "x")
        x = torch.randn(4, 6, 8)
    y = model(x).detach()
    fl.optimize_(model, x, config=config)
    torch.testing.assert_close(model(x).detach(), y, rtol=1e-4, atol=1e-4)


def test_families_that_are_off_are_not_looked_for() -> None:
    config = fl.Config(families=("linear_act",), tune=False)
    result = fl.optimize_(nn.Sequential(Loop(16, 4)), torch.randn(16, 64), config=config)
    assert not [f for f in result.findings if f.code == "grouped_linear"]
