"""Which tiles Triton's products of 16 bits take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.experiments.configurations import linear_products as experiment
from benchmarks.experiments.configurations.rows import mean, read, regrets
from fastlinear.families.linear.triton.product_config import BLOCKS, candidates, config_for

ROOT = Path(__file__).parents[3]
BF16 = torch.bfloat16
HOPPER, AMPERE = (9, 0), (8, 0)


def test_the_model_of_time_chooses_what_was_fastest() -> None:
    """Of the configurations that were timed for each of 367 drawn products."""
    kind = experiment.KIND
    rows = read(kind, ROOT / "results/nvidia-h200/linear-products.jsonl.gz")["bfloat16"]
    served = [row for row in rows if kind.serves(row.problem, row.config)]
    found = regrets(served, np.array([kind.microseconds(r.problem, r.config) for r in served]))
    assert len(found) > 360
    assert mean(found) < 1.06
    assert mean(regrets(served, np.ones(len(served)))) > 1.15


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
@pytest.mark.parametrize("wide", [True, False])
def test_some_configuration_serves_every_product(capability: tuple[int, int], wide: bool) -> None:
    for rows in (1, 17, 300, 8192, 100_000):
        for depth, cols in ((1, 1), (7, 4096), (64, 64), (4096, 1), (12288, 49152)):
            sizes = rows, depth, cols, BF16, capability
            able = list(candidates(*sizes, wide, (wide, wide)))
            assert config_for(*sizes, wide, (wide, wide)) in able
            assert all(c.problem(BF16, capability) is None for c in able)
            assert {c.kind for c in able} <= {"pointer", "tma"} - (set() if wide else {"tma"})
            assert config_for(*sizes, wide, (wide, wide), one_order=True).splits == 1


def test_few_outputs_of_a_deep_sum_are_split() -> None:
    """A layer of 512 to 12 features with 35,664 rows: its weight's gradient."""
    deep = config_for(512, 35_664, 12, BF16, HOPPER, False, (True, False))
    assert deep.splits > 4
    assert config_for(4096, 64, 4096, BF16, HOPPER).splits == 1


def test_large_products_take_large_tiles() -> None:
    chosen = config_for(8192, 4096, 4096, BF16, HOPPER)
    assert (chosen.kind, chosen.block_r * chosen.block_c) == ("tma", 128 * 256)
    assert chosen in BLOCKS
