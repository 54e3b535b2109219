"""Plans, caches and rows of others: what is too large is refused before it costs anything."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlinear as fl
from benchmarks.harness import rows
from fastlinear.core.errors import CacheWarning, InputError, PlanError
from fastlinear.dispatch import cache
from fastlinear.rewrite import apply as applying
from fastlinear.rewrite import plan as plans
from fastlinear.rewrite.verify import inputs as drawn_inputs
from fastlinear.rewrite.verify.inputs import from_specs

CONFIG = fl.Config(time_budget_s=0.1, draws=1)


def tensors(*shapes: list[int]) -> dict[str, Any]:
    return {"args": [{"tensor": "float32", "shape": s} for s in shapes], "kwargs": {}}


@pytest.mark.parametrize(
    "shapes",
    [([1 << 20, 1 << 20],), ([1 << 29], [1 << 29], [1]), ([-1, 1 << 40],), ([1 << 62, 1 << 62],)],
)
def test_inputs_that_a_plan_describes(
    shapes: tuple[list[int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn_inputs, "_normal", lambda *_: torch.zeros(()))
    with pytest.raises(PlanError, match="inputs have at most 1073741824 numbers"):
        from_specs(tensors(*shapes), torch.device("meta"), 0)


def test_long_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    result = fl.optimize_(model, torch.ones(2, 8), config=CONFIG)
    path = result.save(tmp_path / "plan.json")
    result.revert()
    monkeypatch.setattr(plans, "_MOST_BYTES", path.stat().st_size)
    fl.apply_(model, path).revert()
    with path.open("a") as file:
        file.write(" ")
    with pytest.raises(PlanError, match="longer than"):
        fl.apply_(model, path)

    monkeypatch.setattr(cache, "_MOST_BYTES", 100)
    held = cache.cache_path("cpu")
    held.write_text(json.dumps({"format": cache.FORMAT, "entries": {}}) + " " * 100)
    cache.forget()
    with pytest.warns(CacheWarning, match="longer than"):
        assert cache.entries("cpu") == {}

    monkeypatch.setattr(rows, "_MOST_CHARACTERS", 1000)
    packed = tmp_path / "rows.jsonl.gz"
    with gzip.open(packed, "wt") as file:
        file.write(json.dumps({"contender": "x" * 2000, "metric": "wall"}) + "\n")
    with pytest.raises(InputError, match="at most"):
        rows.read_rows(packed)


def test_an_endless_file_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST_BYTES", 1 << 16)
    with pytest.raises(PlanError, match="longer than"):
        fl.apply_(nn.Linear(2, 2), "/dev/zero")


def test_many_rewrites_are_read_in_linear_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    result = fl.optimize_(model, torch.ones(2, 8), config=CONFIG)
    data = result.plan.to_json()
    result.revert()
    one = {
        "fqn": "",
        "rule": "linear_act",
        "route": "parent",
        "activation": "relu",
        "activation_fqn": None,
        "parent_fqn": None,
        "backend": None,
    }
    known = data["rewrites"][0] if data["rewrites"] else one
    data["rewrites"] = [{**known, "problem": {}, "fqn": str(i)} for i in range(20_000)]
    assert len(plans.load(data).rewrites) == 20_000
    data["rewrites"].append(data["rewrites"][0])
    with pytest.raises(PlanError, match="unknown rewrite"):
        plans.load(data)


def test_the_time_budget_of_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    result = fl.optimize_(model, torch.ones(2, 8), config=CONFIG)
    result.revert()
    seen: list[fl.Config] = []
    prepare = applying.prepare

    def watched(function: str, model: Any, inputs: Any, config: fl.Config, *rest: Any) -> Any:
        seen.append(config)
        return prepare(function, model, inputs, config, *rest)

    monkeypatch.setattr(applying, "prepare", watched)
    fl.apply_(model, result.plan.to_json(), time_budget_s=0.5).revert()
    assert seen[0].time_budget_s == 0.5
    with pytest.raises(InputError, match="time_budget_s"):
        fl.apply_(model, result.plan.to_json(), time_budget_s=0)
