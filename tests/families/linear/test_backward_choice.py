"""Which configuration the whole backward of linear_act takes in Triton."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.experiments.configurations import linear_backward as experiment
from benchmarks.experiments.configurations.rows import mean, read, regrets
from fastlinear.families.linear.triton.backward_config import (
    candidates,
    config_for,
    kind_of,
    microseconds,
)
from fastlinear.families.linear.triton.config import BackwardConfig, TilesConfig

ROOT = Path(__file__).parents[3]
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 1.07), ("float32", 1.09)])
def test_the_model_of_time_chooses_what_was_fastest(dtype: str, most: float) -> None:
    """Of the configurations that were timed for each of 220 drawn calls."""
    kind = experiment.KIND
    rows = read(kind, ROOT / "results/nvidia-h200/linear-backward.jsonl.gz")[dtype]
    served = [row for row in rows if kind.serves(row.problem, row.config)]
    found = regrets(served, np.array([kind.microseconds(r.problem, r.config) for r in served]))
    assert len(found) > 70
    assert mean(found) < most
    assert mean(regrets(served, np.ones(len(served)))) > 1.15


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_some_configuration_serves_every_call(dtype: torch.dtype, activation: str) -> None:
    for M in (1, 5, 16, 17, 31, 32, 33, 64, 65, 128, 129, 8192):
        for K, N in ((1, 1), (7, 4096), (64, 64), (4096, 1), (12288, 49152)):
            for wide in ((True, True), (True, False), (False, True), (False, False)):
                call = M, K, N, dtype, activation, wide
                able = list(candidates(*call))
                chosen = config_for(*call)
                assert microseconds(chosen, *call) == min(microseconds(c, *call) for c in able)
                assert (kind_of(chosen) == "tiles") >= (M > 128)
                assert M > 32 or kind_of(chosen) != "tiles"
                assert all(not c.dpre_first or activation != "none" for c in able)


def test_derivatives_that_take_long_are_formed_first() -> None:
    assert config_for(512, 1024, 1024, BF16, "gelu").dpre_first
    assert not config_for(16, 512, 512, BF16, "relu").dpre_first


def test_few_rows_of_a_deep_sum_are_sliced() -> None:
    deep = config_for(16, 512, 8192, BF16, "none")
    assert isinstance(deep, BackwardConfig)
    assert deep.slices >= 4
    shallow = config_for(64, 8192, 64, BF16, "none")
    assert isinstance(shallow, TilesConfig) or shallow.slices == 1


def test_few_rows_in_float32_take_multiply_adds() -> None:
    assert kind_of(config_for(1, 512, 512, FP32, "relu")) == "fma"
    assert kind_of(config_for(16, 512, 512, FP32, "relu")) == "dot"
