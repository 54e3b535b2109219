"""What trying a module on numbers does not show: modules that do more are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rewrite.grouped_models import FAST, optimized


class Weights(nn.Module):
    """A weight per group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 4, 5))


class StoppedInput(Weights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.detach(), self.w.transpose(1, 2))


class StoppedWeight(Weights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.w.detach().transpose(1, 2))


class Shortened(Weights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x[:, :64], self.w.transpose(1, 2))


class ShortenedFromTheEnd(Weights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x[:, -16:], self.w.transpose(1, 2))


class BoundedWeight(Weights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.w.clamp(-8, 8).transpose(1, 2))


class BoundedTail(Weights):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x, self.w.transpose(1, 2))
        return torch.cat([y[:1], y[1:].clamp(-100, 100)])


@pytest.mark.parametrize(
    "kind",
    [StoppedInput, StoppedWeight, Shortened, ShortenedFromTheEnd, BoundedWeight, BoundedTail],
)
def test_weights_per_group_that_do_more(kind: type[Weights], clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(kind(), nn.Linear(4, 4)), torch.randn(3, 9, 5)
    plain = copy.deepcopy(model)
    optimized(model, x)
    for one in (x, torch.randn(3, 100, 5), 100 * x):
        assert torch.equal(model[0](one), plain[0](one))
    with torch.no_grad():
        for m in (model, plain):
            m[0].w.mul_(20)
    assert torch.equal(model[0](x), plain[0](x))
    grads = []
    for m in (model, plain):
        leaf = x.clone().requires_grad_()
        m(leaf).sum().backward()
        grads.append((leaf.grad is None, m[0].w.grad is None))
    assert grads[0] == grads[1]


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.u = nn.Linear(8, 16), nn.Linear(8, 16)
        self.d = nn.Linear(16, 8)


class StoppedGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.silu(self.g(x)) * self.u(x.detach()))


class CleanedGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        x = x.nan_to_num()
        return self.d(F.silu(self.g(x)) * self.u(x))


class ShortenedGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        x = x[:256]
        return self.d(F.silu(self.g(x)) * self.u(x))


@pytest.mark.parametrize("kind", [StoppedGate, CleanedGate, ShortenedGate])
def test_gates_that_do_more(kind: type[Gate], clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(kind()), torch.randn(12, 8)
    plain = copy.deepcopy(model)
    optimized(model, x)
    spoilt = x.clone()
    spoilt[0, 0] = float("nan")
    for one in (x, torch.randn(300, 8), spoilt):
        torch.testing.assert_close(model(one), plain(one), equal_nan=True)
    grads = []
    for m in (model, plain):
        leaf = x.clone().requires_grad_()
        m(leaf).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


class Counting(nn.Module):
    """A loop over parts behind something that must not run twice."""

    def __init__(self, before: nn.Module | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = before
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.before is None:
            self.calls.add_(1)
        else:
            x = self.before(x)
        parts = [layer(part) for layer, part in zip(self.layers, x.split(8, -1), strict=False)]
        return F.relu(self.out(sum(parts)))


@pytest.mark.parametrize("before", [None, nn.BatchNorm1d(9, affine=False), nn.Dropout(0.5)])
def test_what_runs_before_a_loop_runs_once(before: nn.Module | None, clock: Any) -> None:
    """With another number of parts, the class's own forward must not run on what has run."""
    clock(FAST)
    model, x = nn.Sequential(Counting(copy.deepcopy(before))), torch.randn(2, 9, 32)
    plain = copy.deepcopy(model)
    optimized(model, x)
    results = []
    for m in (model, plain):
        m.train()
        torch.manual_seed(1)
        y = m(torch.arange(432.0).view(2, 9, 24))
        drawn = torch.rand(())  # what is drawn next
        results.append((y, drawn, dict(m.named_buffers())))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-4)


class Frozen(nn.Module):
    """Frozen layers whose results are written to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(4))
        self.more, self.out = nn.Linear(32, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        ys = [layer(part) for layer, part in zip(self.layers, x.chunk(4, -1), strict=True)]
        y = ys[0].add_(self.more(x))
        return self.out(y + ys[1] * ys[2] + ys[3])


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_results_of_frozen_layers_may_be_written_to(mode: str, clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(Frozen()), torch.randn(9, 32)
    plain = copy.deepcopy(model)
    optimized(model, x, mode)
    for m in (model, plain):
        m(x).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_parts_of_other_sizes_raise_as_they_do(clock: Any) -> None:
    from fastlinear.rewrite.rules.grouped.rows.loop_forward import call_parts

    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    x = torch.randn(5, 12)
    names = [f"layers.{i}" for i in range(3)]
    assert len(call_parts(model, names, x.split(4, -1), x)) == 3
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call_parts(model, names, x.split([4, 2, 6], -1), x)
