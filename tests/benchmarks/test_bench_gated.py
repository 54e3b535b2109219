"""Experiment ``gated-mlp``: its cases, its contenders, and that all of them compute the same."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.contenders import gated_mlp as experiment
from benchmarks.experiments import gated_mlp as cases_of
from benchmarks.harness import measure as measure_module
from benchmarks.harness.case import Case
from benchmarks.harness.measure import run_case
from benchmarks.harness.settings import Settings
from fastlinear.core.cost import Ceilings

SETTINGS = Settings(torch.device("cpu"), rounds=5, budget_s=0.1)
PEERS = {"eager", "eager_stacked", "compile", "compile_stacked", "compile_max_autotune"}
ELSEWHERE = {"liger", "quack", "quack_untuned", "fastlinear[elementwise]", "fastlinear[triton]"}


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: Ceilings(1e15, 1e15))


def tiny(direction: str, activation: str = "silu", bias: str = "no") -> Case:
    (first, *_) = cases_of.cases("cpu", quick=True)
    sizes = (("M", 40), ("K", 24), ("H", 32), ("N", 24))
    options = (("activation", activation), ("bias", bias))
    return dataclasses.replace(first, dims=sizes, direction=direction, options=options)


def test_the_cases_are_the_decisive_ones_and_the_models() -> None:
    found = [
        (c.dim("M"), c.dim("K"), c.dim("H"), c.option("bias"), c.direction)
        for c in cases_of.cases("cuda")
    ]
    for sizes in ((4096, 1024, 4096), (16384, 2048, 8192), (8192, 4096, 11008), (64, 4096, 11008)):
        for direction in ("forward", "forward+backward"):
            for bias in ("no", "yes"):
                assert (*sizes, bias, direction) in found
    assert {(k, h) for _, k, h, *_ in found} == {s[:2] for s in cases_of.MODELS.values()}
    assert {m for m, *_ in found} >= {16, 16384}
    names = [c.name for c in cases_of.cases("cuda")]
    assert len(names) == len(set(names))
    assert {c.dtype for c in cases_of.cases("cpu")} == {"float32", "bfloat16", "float16"}


@pytest.mark.parametrize("bias", ["no", "yes"])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_every_contender_is_right(direction: str, bias: str) -> None:
    for activation in ("silu", "relu"):
        case = tiny(direction, activation, bias)
        wanted = [p for p in experiment.peers(case) if not p.name.startswith("compile")]
        rows = run_case(case, SETTINGS, wanted)
        skipped = {r["contender"]: r["skipped"] for r in rows if r["skipped"]}
        assert not any(why.startswith("failed") for why in skipped.values()), skipped
        if not torch.cuda.is_available():
            assert set(skipped) >= ELSEWHERE
        for row in rows:
            if not row["skipped"]:
                assert row["valid"], row["contender"]
                assert row["median_us"] > 0
        done = {r["contender"] for r in rows} - set(skipped)
        assert done >= {"eager", "eager_stacked", "fastlinear", "fastlinear_stacked"}
        assert ("fastlinear_bare_products" in done) is (bias == "no")
        assert ("fastlinear_without_biases" in done) is (bias == "yes")
        assert ("fastlinear_recomputing" in done) is (direction != "forward")
        ours = next(r for r in rows if r["contender"] == "fastlinear")
        assert ours["chosen"]["forward"]
        assert ours["best_peer"] in PEERS  # the floor is no peer


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_contenders_are_right() -> None:
    case = tiny("forward")
    names = ("eager", "compile", "compile_stacked")
    wanted = [p for p in experiment.peers(case) if p.name in names]
    assert all(r["valid"] for r in run_case(case, SETTINGS, wanted))


def test_a_wrong_contender_is_found() -> None:
    def without_gate(_: Case) -> Any:
        return lambda x, w, b: F.linear(F.linear(x, w.up), w.down)

    wrong, right = (
        experiment._peer("wrong", without_gate),
        experiment._peer("right", experiment.eager),
    )
    rows = run_case(tiny("forward"), SETTINGS, [wrong, right])
    (row,) = (r for r in rows if r["contender"] == "wrong")
    assert not row["valid"]
    assert row["median_us"] is None


def test_costs_are_each_tensor_once() -> None:
    for direction, passes, products in (("forward", 1, 1), ("forward+backward", 2, 3)):
        work = experiment.make_work(tiny(direction), torch.device("cpu"))
        cost = work.cost()
        assert cost.bytes == passes * 4 * (2 * 40 * 24 + 3 * 24 * 32)
        assert cost.flops == products * 2 * 40 * 3 * 24 * 32
