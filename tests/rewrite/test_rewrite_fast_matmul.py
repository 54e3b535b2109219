"""``Config(allow_fast_matmul=True)``: Strassen's algorithm takes part in chains, and only then."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from rewrite_models import Clock
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.compare import DEFAULT_FACTOR
from fastlinear.core.errors import PlanError, UnsupportedError
from fastlinear.ops.mlp.strassen_scheme import error_growth
from fastlinear.rewrite.exchange import forwards
from fastlinear.rewrite.trial import keep_accurate
from fastlinear.rewrite.verify import verdicts

op = importlib.import_module("fastlinear.ops.mlp.op")
FORCED = {"mlp": "strassen"}


class Coded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 24))


def config(**more: Any) -> fl.Config:
    return fl.Config(allow_fast_matmul=True, backends=FORCED, tune=False, **more)


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What every call of ``mlp`` of a rewritten forward said about fast products."""
    seen: list[bool] = []
    real = forwards.mlp

    def mlp(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs["allow_fast_matmul"])
        y: Tensor = real(*args, **kwargs)
        return y

    monkeypatch.setattr(forwards, "mlp", mlp)
    return seen


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("make", [sequential, Coded])
def test_strassen_takes_part_and_a_plan_brings_it_back(
    make: Any, mode: str, clock: Clock, flags: list[bool], tmp_path: Path
) -> None:
    clock({"after": 50.0})
    torch.manual_seed(0)
    model = make().train(mode == "train")
    x = torch.randn(64, 32)
    result = fl.optimize_(model, x, config=config(mode=mode))
    assert result.kept == 2, result.table()
    assert {s.rule for s in result.sites} == {"mlp"}
    assert {s.backends["forward"] for s in result.sites} == {"strassen"}
    assert any("Strassen" in note for note in result.notes)
    flags.clear()
    y = model(x)
    assert flags == [True]
    path = tmp_path / "plan.json"
    result.save(path)
    result.revert()
    torch.testing.assert_close(y, model(x))
    again = fl.apply_(model, path)
    assert again.kept == 2, again.table()
    assert {s.backends["forward"] for s in again.sites} == {"strassen"}
    flags.clear()
    assert torch.equal(model(x), y)
    assert flags == [True]


def test_without_the_flag_it_stays_out(clock: Clock, flags: list[bool]) -> None:
    clock({"after": 50.0})
    model, x = sequential().eval(), torch.randn(64, 32)
    with pytest.raises(UnsupportedError, match="allow_fast_matmul=True"):
        fl.optimize_(model, x, config=fl.Config(backends=FORCED, tune=False))
    result = fl.optimize_(model, x, config=fl.Config(backends={"mlp": "layerwise"}, tune=False))
    flags.clear()
    model(x)
    assert flags == [False] * (result.kept > 0)
    assert not any(r.allow_fast_matmul for r in result.plan.rewrites)


def test_a_plan_without_the_field_and_with_a_bad_one(clock: Clock) -> None:
    clock({"after": 50.0})
    model, x = sequential().eval(), torch.randn(64, 32)
    stored = fl.optimize_(model, x, config=config()).plan.to_json()
    bad, old = copy.deepcopy(stored), copy.deepcopy(stored)
    for rewrite in bad["rewrites"]:
        rewrite["allow_fast_matmul"] = "yes"
    for rewrite in old["rewrites"]:
        del rewrite["allow_fast_matmul"]
    fresh = sequential().eval()
    with pytest.raises(PlanError, match="bad or missing field"):
        fl.apply_(fresh, bad)
    with pytest.raises(UnsupportedError, match="allow_fast_matmul"):
        fl.apply_(fresh, old)


def test_its_own_limit_is_for_its_chains_only(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linear beside the chain must pass the usual limit before the chain joins it."""
    clock({"after": 50.0})
    model = nn.Sequential(nn.LayerNorm(32), sequential(), nn.Softmax(-1)).eval()
    model.append(nn.Linear(24, 8))
    factors: list[float] = []
    real = keep_accurate.verdicts_of

    def noted(work: Any, swaps: Any, factor: float, like: Any = None) -> Any:
        factors.append(factor)
        return real(work, swaps, factor, like)

    monkeypatch.setattr(keep_accurate, "verdicts_of", noted)
    backends = {**FORCED, "linear_act": "onednn"}
    chosen = fl.Config(allow_fast_matmul=True, backends=backends, tune=False)
    result = fl.optimize_(model, torch.randn(64, 32), config=chosen)
    assert result.kept == 3, result.table()
    wide = DEFAULT_FACTOR * error_growth(1)
    assert factors[:2] == [DEFAULT_FACTOR, wide]


def test_a_chain_between_the_limits_passes_only_as_strassens(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of four times PyTorch's: allowed to Strassen's algorithm, to no other backend."""
    clock({"after": 50.0})
    real = verdicts.relative_error
    calls = iter(range(10**6))
    monkeypatch.setattr(  # errors are taken of ours, then of PyTorch's
        verdicts, "relative_error", lambda *a: real(*a) and (4e-6, 1e-6)[next(calls) % 2]
    )
    x = torch.randn(64, 32)
    passed = fl.optimize_(sequential().eval(), x, config=config())
    assert passed.kept == 2, passed.table()
    other = fl.Config(backends={"mlp": "layerwise"}, allow_fast_matmul=True, tune=False)
    refused = fl.optimize_(sequential().eval(), x, config=other)
    assert refused.kept == 0
    assert any("less accurate" in note for note in refused.notes)
