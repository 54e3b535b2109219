"""Mixtures of experts: told with the op that computes them, and not rewritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl


class Mixture(nn.Module):
    """Each token goes to the expert with the highest score."""

    def __init__(self, make: Any = lambda: nn.Linear(8, 8), count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(8, count)
        self.experts = nn.ModuleList(make() for _ in range(count))

    def chosen(self, x: Tensor) -> Tensor:
        return self.gate(x).argmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        top, y = self.chosen(x), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (top == i).nonzero().squeeze(-1)
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]))
        return y


class Fixed(Mixture):
    """As many rows for each, whatever the data."""

    def chosen(self, x: Tensor) -> Tensor:
        return torch.arange(len(x)) % len(self.experts)


class Sliced(Mixture):
    """Rows of their own, of numbers that the code says: it can be traced."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = (1, 2, 3, 14)
        found, at = [], 0
        for i in range(4):
            found.append(self.experts[i](x.narrow(0, at, sizes[i])))
            at += sizes[i]
        return torch.cat(found)


class Once(Mixture):
    """One of them takes all."""

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x.sum() > 0)](x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, False), nn.GELU(), nn.Linear(16, 8, False))


def found(result: Any) -> list[Any]:
    return [f for f in result.findings if f.code == "ragged_linear"]


def drawn() -> Tensor:
    return torch.randn(20, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 8), mlp])
def test_a_mixture_is_named_with_the_op_for_it(make: Any, mode: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(8), Mixture(make)), drawn()
    seen: list[int] = [0] * 4
    for i, expert in enumerate(model[1].experts):
        expert.register_forward_hook(lambda _, a, __, i=i: seen.__setitem__(i, len(a[0])))
    model(x)
    for expert in model[1].experts:
        expert._forward_hooks.clear()
    assert len(set(seen)) > 1
    for report in (
        fl.profile(model, x, mode, steps=1),
        fl.optimize_(model, x, config=fl.Config(mode=mode, tune=False, time_budget_s=3.0)),
    ):
        (one,) = found(report)
        assert one.fqn == "1"
        assert one.details["rows"] == seen
        assert one.details["experts"] == [f"1.experts.{i}" for i in range(4)]
        what = "linears" if make is not mlp else "experts of 2 linears"
        assert one.title == f"4 equal {what} on rows of their own"
        called = sorted(n for n in seen if n)
        assert f"{len(called)} of 4 equal {what} ran one after another, on {called[0]} to" in (
            one.message
        )
        assert "optimize_ rewrites nothing: " in one.message
        assert one.advice is not None
        assert one.advice.startswith("fl.ragged_linear(x, torch.stack([m.weight for m in ")
        assert (", torch.stack([m.bias for m in " in one.advice) is (make is not mlp)
        assert one.predicted_gain_us == 0.0
        assert one.measured_us > 0
        assert one.floor_us > 0
    assert "forward" not in vars(model[1])


def test_the_advice_computes_what_the_mixture_does() -> None:
    model, x = Mixture(), drawn()
    top = model.chosen(x)
    order = top.argsort()
    names = {"x": x[order], "model": model, "fl": fl, "torch": torch}
    names["group_sizes"] = torch.bincount(top, minlength=4)
    (one,) = found(fl.profile(model, x, steps=1))
    code = str(one.advice).rpartition(", the weights")[0]
    y = eval(code, names)
    torch.testing.assert_close(torch.empty_like(y).index_copy(0, order, y), model(x))


@pytest.mark.parametrize("make", [Fixed, Sliced, Once])
def test_what_data_do_not_deal_out_is_none(make: Any) -> None:
    assert not found(fl.profile(make(), drawn(), steps=1))


def test_unequal_experts_are_none() -> None:
    model = Mixture()
    model.experts[1] = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    assert not found(fl.profile(model, drawn(), steps=1))


def test_settings_leave_it_out() -> None:
    config = fl.Config(families=("linear_act",), tune=False, time_budget_s=3.0)
    assert not found(fl.optimize_(Mixture(), drawn(), config=config))
