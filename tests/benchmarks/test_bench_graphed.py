"""Experiment ``graphed``: its cases, its contenders, and that all of them compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.contenders import graphed as experiment
from benchmarks.experiments import graphed as cases_of
from benchmarks.harness import measure as measure_module
from benchmarks.harness.measure import Settings, run_case
from fastlinear.core.cost import Ceilings
from fastlinear.cuda_graphs import graphed as module_of_graphed
from tests.core.graph_tape import TapeRecorder

CPU = torch.device("cpu")
SETTINGS = Settings(CPU, rounds=5, budget_s=0.2)
CASES = cases_of.cases("cpu", quick=True)


@pytest.fixture(autouse=True)
def _no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: Ceilings(1e15, 1e15))


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape stands in for CUDA's graphs."""
    monkeypatch.setattr(module_of_graphed, "CudaRecorder", TapeRecorder)
    monkeypatch.setattr(experiment, "cuda_only", lambda _: None)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_contender_is_judged(case: Any, tape: None) -> None:
    rows = {r["contender"]: r for r in run_case(case, SETTINGS)}
    assert set(rows) == {
        *("eager", "compile_reduce_overhead", "make_graphed_callables"),
        *("fastlinear", "fastlinear_reusing", "fastlinear[mlp]"),
    }
    block = case.option("model") == "block"
    ours = ["fastlinear", "fastlinear_reusing", *([] if block else ["fastlinear[mlp]"])]
    for name in ("eager", *ours):
        assert rows[name]["valid"], rows[name]["verdicts"]
        assert rows[name]["median_us"] > 0
    assert ("linear layers" in (rows["fastlinear[mlp]"]["skipped"] or "")) == block
    names = [v["name"] for v in rows["fastlinear"]["verdicts"]]
    assert (len(names) > 1) == case.needs_grad
    assert rows["fastlinear"]["best_peer"] == "eager"


def test_on_a_cpu_only_eager_takes_part() -> None:
    rows = {r["contender"]: r for r in run_case(CASES[0], SETTINGS)}
    assert rows["eager"]["valid"]
    assert all("CUDA" in r["skipped"] for n, r in rows.items() if n not in ("eager",))


@pytest.mark.parametrize("case", [c for c in CASES if c.option("model") == "block"], ids=str)
def test_a_wrong_contender_is_not_timed(
    case: Any, tape: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 1.001

    real = experiment.graphed
    monkeypatch.setattr(experiment, "graphed", lambda m: real(Wrong(m)))
    rows = {r["contender"]: r for r in run_case(case, SETTINGS)}
    assert not rows["fastlinear"]["valid"]
    assert rows["fastlinear"]["median_us"] is None


def test_steps_of_one_contender_leave_the_others_alone() -> None:
    case = next(c for c in CASES if c.option("model") == "block" and c.needs_grad)
    work = experiment.make_work(case, CPU)
    before = [p.clone() for p in work.model.parameters()]
    own = work.private()
    with own.mode():
        first = own.unit(lambda s: own.model(s.x))(0)
    assert len(first) == len(work.names)
    assert all(map(torch.equal, before, work.model.parameters()))
    assert not all(map(torch.equal, before, own.model.parameters()))
    assert work.cost().flops > 2 * own.private().stacks[0].x.numel()
