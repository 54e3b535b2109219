"""Inputs that tell nothing (zeros, constants, NaN) hide no wrong result: other draws tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastlinear.core.settings import Config
from fastlinear.families.linear.cpu import onednn
from fastlinear.rewrite import apply_, optimize_
from fastlinear.rewrite.verify.inputs import Call, draw, from_specs, input_specs

TELLING_NOTHING = {
    "zeros": torch.zeros(8, 16),
    "constant": torch.full((8, 16), 0.1),
    "nan": torch.full((8, 16), float("nan")),
    "infinite": torch.full((8, 16), float("inf")),
}
FINITE = ["zeros", "constant"]
CONFIG = Config(
    backends={"linear_act": "onednn"}, tune=False, min_speedup=0.5, draws=2, optimizer_steps=1
)


def _model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    nn.init.zeros_(model[0].bias)
    return model


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = onednn.product

    def off_by_half(x: Tensor, weight: Tensor, *rest: Any) -> Any:
        return real(x, weight * 1.5, *rest)

    monkeypatch.setattr(onednn, "product", off_by_half)


@pytest.mark.parametrize("kind", FINITE)
def test_a_wrong_backend_is_rejected_whatever_the_inputs(
    kind: str, fast: None, wrong: None
) -> None:
    result = optimize_(_model(), (TELLING_NOTHING[kind],), config=CONFIG)
    assert [s.status for s in result.sites] == ["rejected"], result.table()


@pytest.mark.parametrize("kind", sorted(set(TELLING_NOTHING) - set(FINITE)))
def test_inputs_that_are_not_finite_are_told(kind: str, fast: None) -> None:
    model = _model()
    result = optimize_(model, (TELLING_NOTHING[kind],), config=CONFIG)
    assert [(s.status, s.code) for s in result.sites] == [("refused", "not_finite")]
    assert "nor are those of the inputs" in result.sites[0].reason


@pytest.mark.parametrize("kind", FINITE)
def test_a_right_backend_is_kept_whatever_the_inputs(kind: str, fast: None) -> None:
    model = _model()
    result = optimize_(model, (TELLING_NOTHING[kind],), config=CONFIG)
    assert [s.status for s in result.sites] == ["kept"], result.sites[0].reason
    plan = result.plan.to_json()
    result.revert()
    assert apply_(model, plan).kept == 1


def test_a_plan_of_zeros_is_verified_on_numbers_that_tell(
    fast: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model = _model()
    result = optimize_(model, (TELLING_NOTHING["zeros"],), config=CONFIG)
    plan = result.plan.to_json()
    result.revert()
    request.getfixturevalue("wrong")
    assert apply_(model, plan).kept == 0


@pytest.mark.parametrize("kind", TELLING_NOTHING)
def test_draws_and_rebuilt_inputs_vary(kind: str) -> None:
    call = Call((TELLING_NOTHING[kind],), {})
    rebuilt = from_specs(input_specs(call), torch.device("cpu"), seed=0)
    for other in (draw(call, 1, seed=0), rebuilt):
        assert 0.7 < float(other.args[0].std()) < 1.3


def test_ranges_numbers_and_masks_are_kept() -> None:
    narrow = 5.0 + 0.01 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    mask, scale, ids = torch.ones(4, dtype=torch.bool), torch.tensor(0.25), torch.arange(6)
    again = draw(Call((narrow, mask, scale, ids), {}), 1, seed=0).args
    assert 0.009 < float(again[0].std()) < 0.011
    assert abs(float(again[0].mean()) - 5) < 1e-3
    assert again[1].equal(mask)
    assert again[2].equal(scale)
    assert sorted(again[3].tolist()) == list(range(6))
