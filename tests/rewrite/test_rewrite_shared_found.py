"""Which linears of a forward that cannot be traced share a call, and why others do not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.swap.modules import is_rewritten
from tests.rewrite.grouped_models import FAST, same_results
from tests.rewrite.rewrite_models import Clock, LoraLinear
from tests.rewrite.route_models import Unfollowed, lists_together


class Branching(nn.Module):
    """Branches on numbers; two of its linears have biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e3:
            return self.q(x) + 1
        h = self.q(x) * self.k(x) + self.v(x)
        return torch.cat([head(h) for head in self.heads], -1)


class Views(Branching):
    """Gives each linear a view of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e3:
            return x
        return self.q(x[:]) + self.k(x[:])


class Swapping(Branching):
    """Writes in a way that shows nowhere."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e3:
            x.data = x + 1
        return self.q(x) + self.k(x)


class Unlike(Branching):
    """Its linears differ in dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.k.double()

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e3:
            return x
        return self.q(x) + self.k(x.double())


QKV, HEADS = {"0.q", "0.k", "0.v"}, {"0.heads.0", "0.heads.1", "0.heads.2"}


def tried(model: nn.Module, x: Tensor, mode: str = "inference", **how: Any) -> Any:
    """``optimize_`` by the rule alone, with settings that take little time."""
    settings = {"draws": 1, "optimizer_steps": 1, "tune": False, "time_budget_s": 300.0}
    filter_fn = how.pop("filter_fn", None)
    config = fl.Config(mode=mode, families=("grouped_linear",), **{**settings, **how})
    return fl.optimize_(model, x, config, filter_fn=filter_fn)


def kept(result: Any) -> dict[str, str]:
    return {s.fqn: s.rule for s in result.sites if s.status == "kept"}


def told(result: Any) -> str:
    return " ".join(f.message for f in result.findings if f.code == "grouped_linear")


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_two_groups_of_one_forward(mode: str, clock: Clock, tmp_path: Path) -> None:
    clock(FAST)
    model, x = nn.Sequential(Branching()).train(mode == "train"), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    result = tried(model, x, mode)
    assert kept(result) == dict.fromkeys(QKV | HEADS, "grouped_linear")
    assert told(result).count("optimize_ has put it in place") == 2
    for given in (x, torch.cat([x, x]), x + 1e4):  # the last takes the other branch
        same_results(model, plain, given)
    result.save(tmp_path / "plan.json")
    result.revert()
    assert not any(is_rewritten(m) for m in model.modules())
    assert kept(fl.apply_(model, tmp_path / "plan.json", x)) == kept(result)
    same_results(model, plain, x)


def test_the_faster_of_two_ways_stays(clock: Clock, tmp_path: Path) -> None:
    clock({**FAST, "layers": 40.0})  # once rewritten as unequal_linear they take less
    model, x = nn.Sequential(Branching()).eval(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with lists_together():
        result = tried(model, x)
        assert kept(result) == dict.fromkeys(QKV | HEADS, "unequal_linear")
        same_results(model, plain, x)
        stored = result.plan.to_json()
        result.revert()
        again = fl.apply_(model, stored, x)
    assert kept(again) == kept(result)
    same_results(model, plain, x)


def test_what_is_slower_is_reverted_and_told(clock: Clock) -> None:
    clock({**FAST, "after": 150.0})
    model = nn.Sequential(Branching()).eval()
    result = tried(model, torch.randn(4, 8))
    assert not kept(result)
    assert not any(is_rewritten(m) for m in model.modules())
    assert any("'0.q' to '0.v' left alone: one call is 0.67x" in note for note in result.notes)


def test_what_is_less_accurate_is_reverted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlinear.rewrite.rules.grouped.rows import forward as rows

    clock(FAST)
    real = rows.linear_act
    monkeypatch.setattr(rows, "linear_act", lambda *a, **how: real(*a, **how) * 1.001)
    model = nn.Sequential(Branching()).eval()
    result = tried(model, torch.randn(4, 8), backends={"grouped_linear": "eager"})
    assert not kept(result)
    assert any("less accurate" in note for note in result.notes)


def _hooked(model: Any) -> None:
    model[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("make", "edit", "why"),
    [
        (Views, None, "its linears are given different tensors of one memory"),
        (Swapping, None, "Swapping.forward names data"),
        (Branching, _hooked, "Branching carries a forward hook"),
    ],
)
def test_what_is_left_alone_says_why(make: Any, edit: Any, why: str, clock: Clock) -> None:
    clock(FAST)
    model = nn.Sequential(make()).eval()
    if edit is not None:
        edit(model)
    result = tried(model, torch.randn(4, 8))
    assert not QKV & set(kept(result))
    assert why in told(result)


def test_linears_that_differ_are_left_alone(clock: Clock) -> None:
    clock(FAST)
    model = nn.Sequential(Unlike()).eval()
    assert not kept(tried(model, torch.randn(4, 8)))


def test_what_others_have_taken_is_left_out(clock: Clock) -> None:
    """An adapter, a hook, a weight that is shared, and what filter_fn says."""
    clock(FAST)
    x = torch.randn(4, 8)
    model: Any = nn.Sequential(Branching()).eval()
    model[0].k = LoraLinear(model[0].k)
    assert "0.k.base_layer" not in kept(tried(model, x))
    model = nn.Sequential(Branching()).eval()
    model[0].k.register_forward_hook(lambda *_: None)
    assert set(kept(tried(model, x))) == {"0.q", "0.v"} | HEADS
    model = nn.Sequential(Branching()).eval()
    model[0].v.weight = model[0].q.weight
    assert set(kept(tried(model, x))) == HEADS
    model = nn.Sequential(Branching()).eval()
    result = tried(model, x, filter_fn=lambda _, fqn: not fqn.endswith("q"))
    assert set(kept(result)) == {"0.k", "0.v"} | HEADS


@pytest.mark.usefixtures("tape", "graphs_run_eagerly")
@pytest.mark.parametrize("how", ["graphs", "compile"])
def test_graphs_and_compiled_models_take_them_in(how: str, clock: Clock) -> None:
    clock(FAST)
    model, x = nn.Sequential(Unfollowed()).eval(), torch.randn(4, 16)
    plain = copy.deepcopy(model)
    result = tried(model, x, **{how: True})
    assert {r.rule for r in result.plan.rewrites} == {
        "grouped_linear",
        "graphed" if how == "graphs" else "compiled",
    }
    for given in (x, x + 1, torch.randn(7, 16)):
        with torch.no_grad():
            torch.testing.assert_close(model(given), plain(given))
