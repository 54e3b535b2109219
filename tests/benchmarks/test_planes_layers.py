"""The experiment of planes: which ways it times, and where it runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.experiments import planes_layers
from fastlinear.families.linear.cuda import planes_backend
from fastlinear.families.linear.cuda.planes_split import Source
from tests.families.planes_places import placed


def test_every_case_is_timed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors that hold nothing: no call is run."""
    monkeypatch.setattr(planes_backend, "is_read", lambda source, n: False)
    place = torch.device("meta")
    late: list[bool] = []

    def time(run: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> float:
        (numbers, *_), *_ = [s or (torch.empty(8, 8, device=place),) for s in sets]
        late.append(planes_backend.is_read(Source(numbers), 8))
        return 1.0

    timed = list(planes_layers.rows(place, time, planes_layers.KINDS[:-1]))
    layers = [row for row in timed if row["case"] == "layer"]
    assert [(r["M"], r["K"], r["N"]) for r in layers] == list(planes_layers.LAYERS)
    of_groups = *planes_layers.GROUPS, *planes_layers.RAGGED
    every = planes_layers.LAYERS, planes_layers.GATES, of_groups
    assert len(timed) == sum(map(len, every))
    for row in timed[-len(of_groups) :]:
        assert {"eager forward", "planes forward kept", "planes backward"} <= {*row["us"]}
    ways = "forward", "forward kept", "dx"
    for row in layers:
        assert {f"{name} {way}" for name in ("split", "read") for way in ways} <= {*row["us"]}
        assert {"eager", "eager backward", "backward"} <= {*row["us"]}
    assert late[3:9] == [False] * 3 + [True] * 3


def test_errors_are_of_every_way_and_all_data() -> None:
    with placed("cpu"), torch.no_grad():
        found = list(planes_layers.errors(8, torch.device("cpu"), 64, 64))
    assert len({row["data"] for row in found}) == 6
    for row in found:
        assert {*row["error"]} == {"eager", "split", "read"}
        assert all(0 < error < 2e-7 for error in row["error"].values())


def test_it_says_what_it_needs(tmp_path: Path) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("a Hopper is here")
    out = tmp_path / "rows.jsonl"
    run = subprocess.run(
        [sys.executable, "-m", planes_layers.__name__, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "Run it on an H100 or H200." in run.stderr
    assert not out.exists()
