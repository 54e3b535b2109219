"""The experiment of learnt derivatives: its ways agree, and it says what fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.experiments import physics
from fastlinear.families.mlp import reference

TASKS = (
    physics.Task("laplacian", (2, 8, 8, 1), "tanh", 64),
    physics.Task("force", (3, 8, 1), "silu", 64),
)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.learnt)
def test_ways_agree(task: physics.Task) -> None:
    given = physics.inputs(task, "cpu", torch.float64)

    def net(x: Any, weights: Any, biases: Any) -> torch.Tensor:
        return reference.mlp(x, weights, biases, task.activation, "none")

    losses = [way(task.learnt, net)(*given) for way in (physics.by_autograd, physics.by_transforms)]
    assert losses[0] > 0
    torch.testing.assert_close(*losses)
    leaves = given[1]
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(physics, "TASKS", TASKS)
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "--out", str(out), "--skip-compile", "--budget", "0.1"])
    physics.main()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["learnt"] for row in found] == ["laplacian", "force"]
    for row in found:
        assert row["M"] == 8
        assert not row["failed"]
        assert set(row["us"]["wall"]) == {"eager", "fastlinear"}


def test_wrong_gradients_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = physics.fl.mlp
    monkeypatch.setattr(physics.fl, "mlp", lambda *given: plain(*given) * 1.001)
    assert physics.row(TASKS[0], "cpu", torch.float32, False, 0.1)["failed"]
