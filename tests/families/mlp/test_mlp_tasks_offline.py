"""tasks.cu compiles for Hopper on a machine without a GPU, and stays in registers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.experiments.configurations.mlp_tasks import KIND
from benchmarks.experiments.configurations.rows import mean, read, regrets
from fastlinear.families.mlp.cuda import tasks
from fastlinear.families.mlp.cuda.tasks import CANDIDATES, Step, Tiles
from fastlinear.kernels.cuda.hopper import ARCH
from tests.families import nvrtc_offline as nvrtc

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("tiles", CANDIDATES, ids=str)
@pytest.mark.parametrize("names", [("relu", "none"), ("gelu", "gelu"), ("tanh", "mish")])
def test_tiles_stay_in_registers(tiles: Tiles, names: tuple[str, str]) -> None:
    found = nvrtc.usage(tasks.source(tiles, torch.bfloat16, *names), "tasks.cu", ARCH)
    assert {one.frame for one in found.values()} == {0}
    assert found[tasks.KERNEL].registers <= 65536 // tiles.threads


@pytest.mark.parametrize("rows", [1, 300, 5000, 70_001])
@pytest.mark.parametrize("tiles", CANDIDATES, ids=str)
def test_every_row_is_in_one_slice(rows: int, tiles: Tiles) -> None:
    widths = 415, 512, 256, 1
    steps = [Step(n, k, True, k) for k, n in reversed(list(pairwise(widths)))]
    found = tasks.order(rows, steps, True, tiles, 132)
    for count, each in zip(found.slices, found.slice_rows, strict=True):
        assert each % tiles.bm == 0
        assert (count - 1) * each < rows <= count * each
    assert list(found.begin) == sorted(found.begin)


@pytest.mark.parametrize("rows", [1, 300, 70_001])
@pytest.mark.parametrize("n", [1, 64, 2032, 4096])
def test_grading_is_shared_out(rows: int, n: int) -> None:
    steps, tiles = [Step(n, 64, True, 64)], CANDIDATES[0]
    found = tasks.order(rows, steps, True, tiles, 132)
    blocks, across = -(-rows // tiles.bm), -(-n // found.graded_columns)
    assert found.graded_columns % 64 == 0
    assert found.begin[0] == blocks * across
    assert across == -(-n // 64) or found.begin[0] >= 132
    assert tasks.order(rows, steps, False, tiles, 132).begin[0] == 0


def test_the_model_of_time_chooses_what_was_fastest() -> None:
    """Of the configurations that were timed for each of some drawn problems."""
    kind = KIND
    (timed,) = read(kind, ROOT / "results/nvidia-h200/mlp-tasks.jsonl.gz").values()
    told = [kind.microseconds(r.problem, r.config) for r in timed]
    assert len(timed) > 2000
    assert mean(regrets(timed, np.array(told))) < 1.04
    assert mean(regrets(timed, np.ones(len(timed)))) > 1.04
