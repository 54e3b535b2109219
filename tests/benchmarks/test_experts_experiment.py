"""The experiment of experts: every way computes the same, and rows say what they are of."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("transformers.integrations.moe")

import fastlinear as fl
from benchmarks.experiments import experts as experiment

SMALL = (
    experiment.Model("Qwen3-30B-A3B", 8, 2, 32, 24),
    experiment.Model("gpt-oss-20b", 4, 2, 32, 16),
)


@pytest.fixture(autouse=True)
def _registered() -> None:
    fl.nn.Experts.register_with_transformers()


@pytest.mark.parametrize("model", SMALL, ids=lambda model: model.name)
def test_all_ways_compute_the_same(model: experiment.Model) -> None:
    made = experiment.layer(model, "cpu", torch.float32)
    x, index = torch.randn(5, 32), torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 3]])
    runs = experiment.ways(made, model, x, (index, torch.rand(5, 2)), compiled=False)
    assert set(runs) == set(experiment.WAYS)
    with torch.no_grad():
        expected = runs["eager"]()
        for name, run in runs.items():
            torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4, msg=name)


def test_weights_are_not_copied_without_bound() -> None:
    model = experiment.Model("Mixtral-8x7B", 8, 2, 4096, 14336)
    x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    with torch.device("meta"):
        made = experiment.layer(SMALL[0], "meta", torch.bfloat16)
    runs = experiment.ways(made, model, x, (x, x), compiled=False)
    assert "batched_mm" not in runs


def test_rows_of_both_directions() -> None:
    told = SMALL[0], 4, "cpu", torch.float32, False, 0.2
    rows = list(experiment.row(*told))
    assert [r["direction"] for r in rows] == ["forward", "forward and backward"]
    for found in rows:
        assert not found["failed"]
        assert set(found["us"]["wall"]) == set(experiment.WAYS)
        assert (found["name"], found["tokens"], found["top"]) == (SMALL[0].name, 4, 2)
