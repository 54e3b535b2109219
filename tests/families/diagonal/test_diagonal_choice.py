"""Which configurations diagonal_linear takes in Triton."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experiments.configurations import diagonal as experiment
from benchmarks.experiments.configurations.rows import (
    mean,
    read,
    regrets,
    regrets_of_chosen,
    told,
)
from fastlinear.families.diagonal.triton.backward_config import candidates, config_for

ROOT = Path(__file__).parents[3]
KINDS = {
    "diagonal": (experiment.BACKWARD, 1.11, 1.16),
    "diagonal-forward": (experiment.FORWARD, 1.08, 1.08),
}
"""Rows → their kind, what the model's choice may take of the best, what a map's took at least."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", KINDS)
def test_the_model_of_time_chooses_what_was_fastest(name: str, dtype: str) -> None:
    """Of the configurations that were timed for each drawn call; a map chose before."""
    kind, most, least = KINDS[name]
    rows = read(kind, ROOT / f"results/nvidia-h200/{name}.jsonl.gz")[dtype]
    found = regrets(rows, np.array([kind.microseconds(r.problem, r.config) for r in rows]))
    assert len(found) > 60
    assert mean(found) < most <= least < mean(regrets_of_chosen(rows))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forwards_as_chosen_beat_the_map_before(dtype: str) -> None:
    """Over the calls of which the choice was timed."""
    kind, ratios = experiment.FORWARD, []
    timed = read(kind, ROOT / "results/nvidia-h200/diagonal-forward.jsonl.gz")[dtype]
    for _, rows in groupby(timed, key=lambda row: told(row.problem)):
        call = list(rows)
        ours = [row.us for row in call if row.config == kind.chosen(row.problem)]
        ratios += [ours[0] / row.us for row in call if row.chosen and ours]
    assert len(ratios) > 20
    assert mean(ratios) < 0.98


@pytest.mark.parametrize("itemsize", [2, 4])
def test_some_configuration_serves_every_call(itemsize: int) -> None:
    for m in (1, 2, 63, 4096, 131_072, 1 << 24):
        for k in (1, 3, 64, 1000, 24_577, 1 << 19):
            for activation in ("none", "silu", "gelu"):
                assert config_for(m, k, itemsize, activation) in list(candidates(m, k))


def test_few_rows_take_one_launch() -> None:
    assert config_for(8, 4096, 2, "relu").whole
    assert not config_for(32_768, 1024, 2, "relu").whole
    assert not config_for(16_607, 8072, 4, "relu").whole, "narrow columns read memory badly"
