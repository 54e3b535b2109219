"""What a sweep of configurations draws, and what it keeps of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.experiments.configurations import rows
from benchmarks.experiments.configurations import sweep as experiment
from benchmarks.experiments.configurations.sweep import KINDS, problems, tried

DRAWN = 60


@pytest.mark.parametrize("name", KINDS)
def test_drawn_problems_have_configurations_and_terms(name: str) -> None:
    kind = KINDS[name]
    drawn = list(islice(problems(name, 3), DRAWN))
    assert drawn == list(islice(problems(name, 3), DRAWN))
    lengths = set()
    for problem in drawn:
        assert json.loads(json.dumps(problem)) == problem
        configs = tried(kind, problem)
        assert configs[0] == kind.chosen(problem)
        assert len(configs) > 1, problem
        for config in configs:
            assert kind.config(problem, json.loads(json.dumps(asdict(config)))) == config
            found = np.array(kind.terms(problem, config))
            assert np.isfinite(found).all(), (problem, config)
            assert (found >= 0).all(), (problem, config)
            lengths.add(len(found))
    assert len(lengths) == 1


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_kept_whatever_a_configuration_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a configuration that fails the reason is kept; it is left out of what is read."""
    problem = next(p for p in problems(name, 3) if p["M"] * p["K"] < 1 << 20)
    count = iter(range(100))

    def timed(run: object, sets: object, place: object) -> float:
        if next(count) == 1:
            raise RuntimeError("out of resource: shared memory")
        return 2.5

    monkeypatch.setattr(experiment.measure, "device_us", timed)
    monkeypatch.setattr(experiment.lookup, "wait", lambda timeout: True)
    monkeypatch.setattr(experiment, "_check", lambda place: None)
    found = experiment.sweep(name, float("inf"), problem, torch.device("meta"))
    assert [row.get("chosen") for row in found] == [True, *[None] * (len(found) - 1)]
    assert found[1]["us"] is None
    assert "shared memory" in found[1]["why"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    (read,) = rows.read(KINDS[name], path).values()
    assert len(read) == len(found) - 1
    assert read[0].problem == problem
    assert read[0].config == KINDS[name].chosen(problem)
    assert experiment.sweep(name, 0.0, problem, torch.device("meta")) == []
