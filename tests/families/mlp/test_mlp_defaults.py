"""The analytic order of chains on a GPU, held to the committed grid of measurements."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from benchmarks.contenders import mlp as chains
from benchmarks.harness.case import Case
from benchmarks.harness.rows import read_rows
from fastlinear.core.problem import Problem
from fastlinear.families.mlp.defaults import inference_order

GRID = Path(__file__).parents[3] / "results/nvidia-h200/overhead.jsonl.gz"


@functools.cache
def grid() -> tuple[tuple[Problem, str, dict[str, float]], ...]:
    """(Problem, metric, backend → µs) of every cell without gradients."""
    found: dict[tuple[str, str], tuple[Problem, dict[str, float]]] = {}
    for row in read_rows(GRID):
        name, metric = row["contender"], row["metric"]
        backend = name.removeprefix("fastlinear[").removesuffix("]")
        ours = backend != name and backend != "strassen"  # no backend today
        if not row["valid"] or not row["median_us"] or not (ours or name == "eager"):
            continue
        key = row["problem"], metric
        if row["direction"] != "forward":
            continue
        if key not in found:
            outside = chains.problem_of(Case.from_json(row["case"]))
            p = outside if metric == "wall" else outside.other_regime()
            assert p is not None
            found[key] = p, {}
        found[key][1][backend] = row["median_us"]
    return tuple((p, key[1], us) for key, (p, us) in found.items())


def behind(metric: str) -> list[float]:
    """Time of the order's first that was measured over the fastest one's, cell by cell."""
    ratios = []
    for p, of, us in grid():
        if of == metric:
            first = next(name for name in inference_order(p) if name in us)
            ratios.append(us[first] / min(us.values()))
    return sorted(ratios)


@pytest.mark.parametrize("metric", ["device", "wall"])
def test_the_first_of_the_order_is_about_the_fastest(metric: str) -> None:
    ratios = behind(metric)
    assert len(ratios) == 560
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.015
    assert sum(r > 1.1 for r in ratios) <= 12
    assert ratios[-1] < 1.4


def test_pytorchs_own_path_is_always_in_the_order() -> None:
    assert all(inference_order(p)[-1] == "eager" for p, _, _ in grid())
