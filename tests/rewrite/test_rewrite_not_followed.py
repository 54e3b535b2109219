"""optimize_ names the weights that it does not follow, beside an outcome for every linear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.optimize import optimize_

QUICK = fl.Config(tune=False, time_budget_s=0.05)
X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


class OwnLinear(nn.Module):
    """Linear-shaped, of a foreign class: a site of its own in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = 8
        self.weights = nn.Parameter(torch.randn(2, 8, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[0])


def test_attention_is_refused_or_named_truthfully(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    result = optimize_(layer, X, config=QUICK)
    assert {s.fqn: s.status for s in result.sites} == dict.fromkeys(
        ("self_attn.out_proj", "linear1", "linear2"), "refused"
    )
    assert all("_transformer_encoder_layer_fwd" in s.reason for s in result.sites)
    assert not any("never" in s.reason for s in result.sites)
    named = {one.fqn for one in result.not_followed}
    assert named == {name for name, p in layer.named_parameters() if p.dim() > 1}
    assert sum(one.share for one in result.not_followed) == pytest.approx(1.0)
    text = result.table()
    assert "Not followed: 100.0%" in text
    assert "self_attn.in_proj_weight" in text
    data = json.loads(json.dumps(result.to_json()))
    assert {one["fqn"] for one in data["not_followed"]} == named
    page = result.html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "What is not followed" in page
    assert "in_proj" in page


def test_what_an_outcome_accounts_for_is_not_named_again() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), OwnLinear(), nn.Linear(8, 8)).eval()
    result = optimize_(model, X, config=QUICK)
    assert {s.fqn: s.code for s in result.sites if s.fqn != "2"} == {"1": "subclass"}
    assert [one.fqn for one in result.not_followed] == ["0.weight"]
    assert [one.fqn for one in result.profile.not_followed] == ["1.weights", "0.weight"]


def test_a_model_without_others_says_nothing_of_them() -> None:
    result = optimize_(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), X, config=QUICK)
    assert result.not_followed == ()
    assert "Not followed" not in result.table()
