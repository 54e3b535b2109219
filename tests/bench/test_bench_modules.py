"""Experiment ``linear-modules``: every contender computes the case's layer, as a module."""

from __future__ import annotations

import pytest
import torch

from fastlinear.bench import measure as measure_module
from fastlinear.bench import modules
from fastlinear.bench.cases import linear_modules
from fastlinear.bench.measure import Settings, run_case
from fastlinear.bench.work import make_work
from fastlinear.core.cost import Ceilings

CPU = torch.device("cpu")


def test_every_contender_is_valid_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: Ceilings(1e15, 1e15))
    settings = Settings(CPU, rounds=5, budget_s=0.1)
    for case in linear_modules.cases("cpu", quick=True):
        rows = {r["contender"]: r for r in run_case(case, settings)}
        left_out = {name for name, r in rows.items() if not r["valid"]}
        assert left_out == ({"sequential"} if case.option("activation") == "none" else set())
        assert {"eager", "fastlinear", "fastlinear[eager]"} <= set(rows)
        assert all(rows[n]["skipped"] for n in left_out)


def test_the_layers_have_the_parameters_of_the_case() -> None:
    (case,) = (
        c
        for c in linear_modules.cases("cpu")
        if c.name.startswith("relu M8 K16 N16 float32") and not c.needs_grad
    )
    stack = make_work(case, CPU).stacks[0]
    expected = torch.relu(stack.x @ stack.weights[0].T + stack.biases[0])
    for made in (modules.two_modules, modules.sequential, modules.ours):
        torch.testing.assert_close(made(stack)(stack), expected)
