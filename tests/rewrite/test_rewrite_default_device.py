"""Under another default device everything is as without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastlinear as fl
from tests.rewrite.quantized_weights import Gated, OnParameters, Projections, Towers
from tests.rewrite.rewrite_models import Functional, mlp

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def on_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_optimize_and_apply(fast: None, request: Any) -> None:
    parts = [Gated(), Projections(), Towers(), OnParameters(), nn.Dropout(0.1), Functional()]
    model = nn.Sequential(*parts, nn.Linear(4, 16), nn.BatchNorm1d(16), mlp())
    before = [t.clone() for t in model.state_dict().values()]
    request.getfixturevalue("on_meta")
    config = fl.Config(
        mode="train",
        draws=2,
        optimizer_steps=1,
        backends={"linear_act": "onednn"},
        time_budget_s=3.0,
    )
    result = fl.optimize_(model, X, config=config)
    assert result.kept
    assert not [n for n in result.notes if "skipped" in n]
    plan = result.plan.to_json()
    result.revert()
    again = fl.apply_(model, plan)  # draws inputs of its own
    assert again.kept
    again.revert()
    now = model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
