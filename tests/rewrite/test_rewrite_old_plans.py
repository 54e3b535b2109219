"""Plans written when Strassen's algorithm was a backend of ``mlp``, and when backends had other
names, still load and apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fastlinear as fl
from fastlinear.core.errors import PlanError
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch.backend import family
from tests.rewrite.rewrite_models import Clock


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 24)).eval()


def old_plan(x: torch.Tensor, backend: str | None, allowed: Any) -> dict[str, Any]:
    """The plan of a chain as 0.1 wrote it, its backend forced or chosen."""
    config = fl.Config(backends={"mlp": "layerwise"}, tune=False)
    result = fl.optimize_(sequential(), x, config=config)
    assert result.kept == 2, result.table()
    plan = result.plan.to_json()
    problem = plan["rewrites"][0]["problem"]
    chain = {
        **problem,
        "family": "mlp",
        "dims": {"M": 64, "L": 2, "K": 32, "H": 48, "N": 24},
        "options": {
            **{"widths": "32-48-24", "activation": "relu", "final": "none", "bias": "yes"},
            **{"x": "rows", "w": "nk"},
        },
    }
    for rewrite in plan["rewrites"]:
        rewrite["allow_fast_matmul"] = allowed
        rewrite["backend"] = backend
        rewrite["backends"] = {"forward": "strassen" if allowed else "layerwise"}
    plan["tuned"] = [
        {
            "problem": chain | {"options": chain["options"] | {"fast": fast}},
            "best": best,
            "times_us": {"eager": 9.0, best: 3.0},
            "doubt": "",
            "rivals": [],
        }
        for fast, best in (("no", "layerwise"), ("yes", "strassen"))
    ]
    return plan


@pytest.mark.parametrize(("backend", "allowed"), [("strassen", True), (None, True), (None, False)])
def test_an_old_plan_applies(backend: str | None, allowed: bool, clock: Clock) -> None:
    clock({"after": 50.0})
    x = torch.randn(64, 32)
    plan = old_plan(x, backend, allowed)
    model = sequential()
    expected = model(x)
    result = fl.apply_(model, plan)
    assert result.kept == 2, result.table()
    assert {s.rule for s in result.sites} == {"mlp"}
    # the measurement without fast products holds
    assert {s.backends["forward"] for s in result.sites} == {"layerwise"}
    missing = any("there is no such backend" in note for note in result.notes)
    assert missing == allowed
    torch.testing.assert_close(model(x), expected)
    assert "allow_fast_matmul" not in str(result.plan.to_json())


def test_a_bad_field_is_refused(clock: Clock) -> None:
    clock({"after": 50.0})
    with pytest.raises(PlanError, match="bad or missing field"):
        fl.apply_(sequential(), old_plan(torch.randn(64, 32), None, "yes"))


def test_former_names_of_backends_are_those_of_today(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})
    x = torch.randn(64, 32)
    plan = old_plan(x, "chain_of_layers", False)
    for told in (*plan["rewrites"], *plan["tuned"]):
        told["problem"]["family"] = "mlp"
    for rewrite in plan["rewrites"]:
        rewrite["backends"] = {"forward": "chain_of_layers"}
    plan["tuned"][0] |= {"best": "chain_of_layers", "rivals": ["chain_of_layers"]}
    plan["tuned"][0]["times_us"] = {"eager": 9.0, "chain_of_layers": 3.0}
    with pytest.raises(PlanError, match="'chain_of_layers'"):
        fl.apply_(sequential(), plan)
    renamed = replace(family("mlp"), renamed={"chain_of_layers": "layerwise"})
    monkeypatch.setitem(registry._FAMILIES, "mlp", renamed)
    result = fl.apply_(sequential(), plan)
    assert result.kept == 2, result.table()
    assert {s.backends["forward"] for s in result.sites} == {"layerwise"}
    assert not any("there is no such backend" in note for note in result.notes)
    assert "chain_of_layers" not in str(result.plan.to_json())
