"""Numbers of rows: which of them are tuned, what a plan says of that, and what others take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastlinear.core.problem import Problem
from fastlinear.core.settings import Config
from fastlinear.dispatch import cache
from fastlinear.dispatch.select import select
from fastlinear.rewrite import apply_, optimize_
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.plan import load
from tests.rewrite.rewrite_models import Clock, mlp, run

pytestmark = [
    pytest.mark.usefixtures("fast"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def rows_of(plan: dict[str, Any]) -> dict[str, set[int]]:
    """Family → the rows it was tuned for."""
    found: dict[str, set[int]] = {}
    for item in plan["tuned"]:
        p = Problem.from_json(item["problem"])
        found.setdefault(p.family, set()).add(p.dim("M"))
    return found


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_further_rows_are_tuned_recorded_and_brought(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp().train(mode == "train")
    config = Config(mode=mode, rows=(60, 9, 300), draws=1, optimizer_steps=1)
    result = optimize_(model, X, config=config)
    assert result.kept
    plan = json.loads(json.dumps(result.plan.to_json()))
    # 60 and 300 go to 64 and 256; 9 goes to the inputs' own 8
    assert all(rows == {8, 64, 256} for rows in rows_of(plan).values()), rows_of(plan)
    assert plan["rows"] == [8, 64, 256] == list(load(plan).rows)
    (note,) = [n for n in result.notes if n.startswith("tuned for")]
    assert "8, 64 and 256 rows" in note
    result.revert()
    kept = Problem.from_json(plan["rewrites"][0]["problem"])
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(tmp_path / "empty"))
    cache.forget()
    assert select(kept.with_rows(64)).source != "tuned"
    again = apply_(model, plan)
    assert select(kept.with_rows(70)).source == "tuned"
    assert any("8, 64 and 256 rows" in n for n in again.notes)
    again.revert()


def test_without_further_rows_the_inputs_alone_are_tuned_and_the_report_says_so() -> None:
    result = optimize_(mlp().eval(), X, config=Config(draws=1))
    assert result.plan.rows == (8,)
    (note,) = [n for n in result.notes if n.startswith("tuned for")]
    assert "8 rows a call" in note
    assert "Config(rows=...)" in result.table()
    result.revert()
    untuned = optimize_(mlp().eval(), X, config=Config(draws=1, tune=False))
    assert untuned.plan.rows == ()
    assert not any(n.startswith("tuned for") for n in untuned.notes)


def test_nothing_kept_nothing_tuned_further(clock: Clock) -> None:
    clock({"after": 200.0, "eager": 1.0})
    result = optimize_(nn.Sequential(nn.Linear(16, 16)).eval(), X, config=Config(rows=(64,)))
    assert not result.kept
    assert result.plan.rows == ()


def test_rows_the_budget_does_not_reach_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.tune_all

    def spent(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("last"):
            kwargs["budget"] = measure.Budget(0.0)
        return real(*args, **kwargs)

    monkeypatch.setattr(measure, "tune_all", spent)
    model = mlp().eval()
    expected = run(model, X)
    result = optimize_(model, X, config=Config(rows=(64,), draws=1))
    assert any("budget ran out before all was tuned for 64 rows" in n for n in result.notes)
    torch.testing.assert_close(run(model, X), expected)
