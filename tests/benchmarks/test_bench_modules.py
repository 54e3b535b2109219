"""Experiment ``linear-modules``: every contender computes the case's layer, as a module."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks.contenders import linear_modules as modules
from benchmarks.experiments import linear_modules
from benchmarks.harness import measure as measure_module
from benchmarks.harness.measure import Settings, run_case
from benchmarks.harness.rows import read_rows
from benchmarks.harness.work import make_work
from fastlinear.core.cost import Ceilings

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


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


def test_committed_rows_hold_what_is_said_of_them() -> None:
    """A call costs at most 3 µs more than the modules it stands for; here, less in every case."""
    rows = read_rows(ROOT / "results" / "amd-epyc" / "linear-modules.jsonl.gz")
    found: dict[tuple[str, bool], list[float]] = {}
    problems = {(r["problem"], r["direction"]) for r in rows}
    assert len(problems) == 48
    for problem, direction in problems:
        both = (
            next(
                r["samples_us"]
                for r in rows
                if (r["problem"], r["direction"], r["contender"]) == (problem, direction, name)
            )
            for name in ("fastlinear", "eager")
        )
        more = median(a - b for a, b in zip(*both, strict=True))
        found.setdefault((problem.split()[0], direction == "forward"), []).append(more)
    assert all(us < 0.0 for each in found.values() for us in each)
    said = {name: found[name, True] for name in ("relu", "gelu", "none")}
    told = {name: (f"{-max(us):.1f}", f"{-min(us):.1f}") for name, us in said.items()}
    assert told == {"relu": ("2.1", "2.4"), "gelu": ("2.5", "2.8"), "none": ("0.7", "0.9")}
    text = " ".join((ROOT / "docs" / "results.md").read_text().split())
    assert "2.1 to 2.4 µs less with ReLU" in text
    assert "2.5 to 2.8 less with GELU, 0.7 to 0.9 less without an activation" in text
