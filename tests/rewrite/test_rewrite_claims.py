"""Each gain is claimed once: by the finding, and in the row, of the call that saves it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.report import page
from fastlinear.rewrite.evaluate import chains

FAST = {"onednn": 50.0, "cpp": 50.0, "pieces": 50.0, "after": 50.0}
K, H = 64, 96


class LlamaMLP(nn.Module):
    """Shaped and named as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(K, H, False), nn.Linear(K, H, False)
        self.down_proj, self.act_fn = nn.Linear(H, K, False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Inline(LlamaMLP):
    """The same amid other work."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return x + y


def optimized(made: nn.Module, **how: Any) -> Any:
    config = fl.Config(draws=1, time_budget_s=60.0, families=("linear_act", "gated_mlp"))
    model = nn.Sequential(nn.LayerNorm(K), made, nn.LayerNorm(K)).eval()
    return fl.optimize_(model, torch.randn(40, K), config=config, **how)


def by_code(result: Any) -> dict[str, Any]:
    """The findings on a gated MLP's linears."""
    return {f.code: f for f in result.findings if f.fqn.startswith("1")}


@pytest.mark.parametrize("make", [LlamaMLP, Inline])
def test_a_gated_mlp_that_is_kept_claims_what_its_linears_would(make: Any, clock: Any) -> None:
    clock(FAST)
    result = optimized(make())
    assert {s.fqn for s in result.sites if s.rule == "gated_mlp"} == {s.fqn for s in result.sites}
    found = by_code(result)
    assert found["gated_mlp"].predicted_gain_us == pytest.approx(50.0)
    pair = found["linear_activation"]
    assert pair.fqn == "1.gate_proj"
    assert (pair.predicted_gain_us, pair.part_of) == (0.0, "1")
    assert pair.details["activation_forward_us"] > 0, "what was seen is still told"
    assert "silu, in 1: its gain is counted there" in pair.message
    told = result.to_json()["profile"]["findings"]
    gains = [f["predicted_gain_us"] for f in told if f["fqn"].startswith("1")]
    assert sum(gains) == pytest.approx(50.0)
    assert not [a for a in result.plan.to_json()["advice"] if a["fqn"].startswith("1")]
    shown = page(result.to_json())
    assert shown.count("predicted gain <b>50.0 µs</b> a step") == 1
    assert "part of <code>1</code>" in shown


@pytest.mark.usefixtures("times_as_given")
@pytest.mark.parametrize("after", [50.0, 100.0])
def test_one_that_is_only_advised_claims_it_where_it_is_faster(
    after: float, finding_times: Any
) -> None:
    finding_times((100.0,) * 5, (after,) * 5)
    found = by_code(optimized(LlamaMLP(), filter_fn=lambda *_: False))
    gated, pair = found["gated_mlp"], found["linear_activation"]
    assert gated.predicted_gain_us == 100.0 - after
    if after < 100.0:
        assert (pair.predicted_gain_us, pair.part_of) == (0.0, "1")
    else:
        assert pair.predicted_gain_us > 0
        assert pair.part_of is None


@pytest.mark.parametrize("every", [True, False])
def test_what_linears_save_one_by_one_is_no_gain_of_one_call(
    every: bool, clock: Any, finding_times: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    finding_times((200.0,) * 5, (80.0,) * 5)
    monkeypatch.setattr(chains, "match", lambda *_: [])
    result = optimized(LlamaMLP(), filter_fn=lambda _, fqn: every or fqn.endswith("gate_proj"))
    kept = {s.fqn for s in result.sites if (s.rule, s.status) == ("linear_act", "kept")}
    assert len(kept) == (3 if every else 1)
    found = by_code(result)
    gated, pair = found["gated_mlp"], found["linear_activation"]
    saved = 50.0 * len(kept)
    text = f"of 120.0 us a step its linears, rewritten one by one, save {saved:.1f}"
    assert text in gated.message
    assert gated.predicted_gain_us == max(0.0, 120.0 - saved)
    assert (gated.advice is None) is every
    assert pair.predicted_gain_us > 0, "its gain is its own: it was made"
    assert pair.part_of is None


@pytest.mark.parametrize("width", [80, 160])
def test_linears_of_one_call_share_a_row_of_numbers(width: int, clock: Any) -> None:
    clock({"after": 50.0, "whole_cpp": 50.0, "layerwise": 60.0})
    layers = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)]
    model = nn.Sequential(*layers).eval()
    result = fl.optimize_(model, torch.randn(8, 32), config=fl.Config(draws=1, families=("mlp",)))
    assert [(s.rule, s.status) for s in result.sites] == [("mlp", "kept")] * 3, result.table()
    assert [s.part_of for s in result.sites] == [None, "0", "0"]
    assert [s.to_json()["part_of"] for s in result.sites] == [None, "0", "0"]
    assert sum(s.before_us - s.after_us for s in result.sites) == pytest.approx(50.0)
    text = " ".join(result.table(width=width).split())
    first, rest = text.split("part of '0', one call with it")[:2]
    assert "100.0" in first, "of the call, not a third of it"
    assert "2.00x" in first
    assert "kept: " in first
    assert "33.3" not in text
    assert "2.00x" not in rest.split("a step")[0].split("Sequential")[0]
    shown = page(result.to_json())
    assert len(re.findall(r"100(?:\.0)? µs → 50\.0 µs</td>", shown)) == 1
    assert shown.count("part of <code>0</code>, one call with it") == 2
