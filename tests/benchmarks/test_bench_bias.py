"""Experiment ``linear-bias``: kernels are counted, each contender has its own oracle."""

from __future__ import annotations

import pytest
import torch

from benchmarks.contenders.linear_act import peers
from benchmarks.contenders.quack import reason_not
from benchmarks.experiments import linear_bias
from benchmarks.harness import measure as measure_module
from benchmarks.harness.kernels import kernels_of
from benchmarks.harness.measure import Settings, run_case
from fastlinear.core.cost import Ceilings
from tests.benchmarks.test_bench_rows import CASE

CPU = torch.device("cpu")


def test_products_and_what_touches_data_are_counted_and_views_are_not() -> None:
    x, w, b = torch.randn(4, 8), torch.randn(16, 8), torch.randn(16)
    with torch.no_grad():
        assert kernels_of(lambda: x @ w.t(), CPU) == ["aten::mm"]
        assert kernels_of(lambda: (x @ w.t()) + b, CPU) == ["aten::mm", "aten::add"]
        assert kernels_of(lambda: x.t().view(8, 2, 2), CPU) == []


def test_every_layout_is_judged_by_its_own_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: Ceilings(1e15, 1e15))
    settings = Settings(CPU, rounds=5, budget_s=0.2)
    for case in linear_bias.cases("cpu", quick=True):
        rows = run_case(case, settings)
        assert all(r["valid"] for r in rows), case.problem
        counted = {r["contender"]: r["kernels"] for r in rows if r["metric"] == "kernels"}
        assert len(counted["matmul_add"]) == len(counted["linear_no_bias"]) + 1
        assert {r["contender"] for r in rows if r["metric"] == "wall"} == set(counted)
        wall = {r["contender"]: r for r in rows if r["metric"] == "wall"}
        assert wall["linear_no_bias"]["kernels"] is None


def test_quack_says_why_it_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    assert "CUDA" in (reason_not(CASE) or "")
    cuda = replace(CASE, device="cuda", dtype="bfloat16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "quack-kernels is not installed" in (reason_not(cuda) or "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "16-bit" in (reason_not(replace(cuda, dtype="float32")) or "")
    gelu = replace(cuda, options=(("activation", "gelu"), ("bias", "yes")))
    assert "gelu" in (reason_not(gelu) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "9.0" in (reason_not(cuda) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert reason_not(cuda) is None
    assert "quack" in {p.name for p in peers(CASE)}
