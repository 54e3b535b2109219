"""Models of transformers whose attention cannot be traced: queries, keys and values as one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.swap import shared_calls
from fastlinear.rewrite.swap.modules import is_rewritten
from tests.rewrite.grouped_models import FAST
from tests.rewrite.rewrite_models import Clock, snapshot

pytest.importorskip("transformers", minversion="5.0")

from tests.rewrite.shared_models import CASES, Case

pytestmark = pytest.mark.filterwarnings("ignore")


def config(mode: str) -> fl.Config:
    return fl.Config(
        mode=mode,
        **{"draws": 1, "optimizer_steps": 1, "tune": False, "time_budget_s": 300.0},  # type: ignore[arg-type]
        families=("grouped_linear",),
    )


def shared(result: Any) -> set[frozenset[str]]:
    """The linears of each module that one call computes."""
    found: dict[str, set[str]] = {}
    for rewrite in result.plan.rewrites:
        assert rewrite.rule in ("grouped_linear", "unequal_linear"), rewrite
        assert rewrite.route == "chain"
        found.setdefault(rewrite.parent_fqn or "", set()).add(rewrite.fqn)
    return {frozenset(names) for names in found.values()}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each result that was taken, and each that was computed for others."""
    seen: list[str] = []
    taken, first = shared_calls._Call._taken, shared_calls._Call._first

    def count(name: str, real: Any) -> Any:
        def run(*given: Any) -> Any:
            y = real(*given)
            seen.append(name if y is not None else f"no {name}")
            return y

        return run

    monkeypatch.setattr(shared_calls._Call, "_taken", count("taken", taken))
    monkeypatch.setattr(shared_calls._Call, "_first", count("first", first))
    return seen


def results(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The output, and every gradient."""
    model.zero_grad()
    y = model(**inputs)[0]
    y.square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach(), **grads}


def same(ours: nn.Module, theirs: nn.Module, case: Case) -> None:
    found, expected = results(ours, case.inputs()), results(theirs, case.inputs())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()) + 1e-6, msg=name
        )
    for model in (ours, theirs):
        model.zero_grad()


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", CASES)
def test_linears_of_one_input_share_a_call(
    name: str, mode: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock(FAST)
    case = CASES[name]
    model = case.make().train(mode == "train")
    plain, before = copy.deepcopy(model), snapshot(model)
    keys = list(model.state_dict())
    result = fl.optimize_(model, case.inputs(), config=config(mode))
    assert set(map(frozenset, case.groups)) <= shared(result), result.table()
    assert list(model.state_dict()) == keys
    assert all(v.passed for v in result.verdicts)
    seen = counted(monkeypatch)
    with torch.no_grad():
        model(**case.inputs())
    taken = sum(len(group) - 1 for group in case.groups)
    assert (seen.count("first"), seen.count("taken")) == (len(case.groups), taken)
    assert len(seen) == len(case.groups) + taken
    same(model, plain, case)
    same(copy.deepcopy(model), plain, case)
    result.save(tmp_path / "plan.json")
    result.revert()
    assert snapshot(model) == before
    assert not any(is_rewritten(m) for m in model.modules())
    if case.groups:
        again = fl.apply_(model, tmp_path / "plan.json", case.inputs())
        assert shared(again) == shared(result)
        same(model, plain, case)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.generates])
def test_generated_tokens_are_the_same(name: str, clock: Clock) -> None:
    clock(FAST)
    case = CASES[name]
    model = case.make().eval()
    plain = copy.deepcopy(model)
    result = fl.optimize_(model, case.inputs(), config=config("inference"))
    assert set(map(frozenset, case.groups)) <= shared(result)
    inputs = case.inputs()
    inputs.pop("decoder_input_ids", None)
    for how in ({"use_cache": True}, {"use_cache": False}, {"num_beams": 2}):
        how = {"do_sample": False, "max_new_tokens": 6, **how}
        found, expected = (m.generate(**inputs, **how) for m in (model, plain))  # type: ignore[operator]
        assert torch.equal(found, expected)
    with torch.no_grad():
        for cache in (True, False):
            found, expected = (m(**case.inputs(), use_cache=cache) for m in (model, plain))
            torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
