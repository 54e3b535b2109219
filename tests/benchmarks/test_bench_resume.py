"""Continuing a run: what is kept, what is measured again, what is refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.experiments import EXPERIMENTS, overhead
from benchmarks.experiments.overhead.heat import heats
from benchmarks.harness import ceilings as ceilings_module
from benchmarks.harness import measure as measure_module
from benchmarks.harness import settings as settings_module
from benchmarks.harness.case import Case
from benchmarks.harness.rows import behind, read_rows, write_rows
from benchmarks.harness.run import run
from benchmarks.harness.settings import Settings
from fastlinear.core.cost import Ceilings
from fastlinear.core.errors import InputError

PEERS = ["eager", "hand_loop", "fastlinear"]
WIDTHS = (16, 32, 48)


def tiny(width: int) -> Case:
    (first, *_) = overhead.cases("cpu", quick=True)
    return dataclasses.replace(first, dims=(("M", 4), ("L", 2), ("H", width)))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of the cases that were measured, as they are."""
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: Ceilings(1e15, 1e15))
    monkeypatch.setitem(EXPERIMENTS, "overhead", lambda device, quick: [tiny(h) for h in WIDTHS])
    widths: list[int] = []
    real = measure_module.run_case

    def noted(case: Case, settings: Settings) -> list[dict[str, Any]]:
        widths.append(case.dim("H"))
        return real(case, settings)

    monkeypatch.setattr(sys.modules["benchmarks.harness.run"], "run_case", noted)
    return widths


def go(**options: Any) -> list[dict[str, Any]]:
    return run("overhead", rounds=5, **{"peers": PEERS} | options)


def width(row: dict[str, Any]) -> int:
    return int(row["case"]["dims"]["H"])


def test_a_compressed_file_is_gone_on_with_too(tmp_path: Path, measured: list[int]) -> None:
    path = tmp_path / "rows.jsonl.gz"
    first = go(resume=path)
    write_rows([r for r in first if width(r) != 48], path)
    measured.clear()
    assert go(resume=path) == read_rows(path)
    assert measured == [48]


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path, measured: list[int]) -> None:
    path = tmp_path / "rows.jsonl"
    first = go(resume=path)  # no such file yet
    assert measured == list(WIDTHS)
    assert read_rows(path) == first
    # killed while the rows of the second case were written
    whole = [json.dumps(r) for r in first if width(r) == 16]
    part = [json.dumps(r) for r in first if width(r) == 32][:-1]
    path.write_text("\n".join([*whole, *part, '{"experiment": "over']))
    measured.clear()
    seen: list[tuple[str, int, int]] = []
    rows = go(resume=path, progress=lambda *a: seen.append(a))
    assert measured == [32, 48]
    assert read_rows(path) == rows
    assert [r for r in rows if width(r) == 16] == [json.loads(line) for line in whole]
    assert {(width(r), r["contender"]) for r in rows} == {(width(r), r["contender"]) for r in first}
    assert len(rows) == len(first)
    assert [(done, total) for _, done, total in seen] == [(1, 3), (2, 3), (3, 3)]
    (heat,) = heats(rows)
    assert heat.widths == WIDTHS
    assert set(heat.speeds["fastlinear"]) == {(2, 4, h) for h in WIDTHS}
    slow = {"best_peer": "another", "median_us": 1e6, "ci95_us": [9e5, 2e6]}
    ours = [r["contender"] == "fastlinear" and width(r) in (16, 48) for r in rows]
    late = behind([r | slow if own else r for r, own in zip(rows, ours, strict=True)])
    assert {width(r) for r in late} >= {16, 48}
    measured.clear()
    assert go(resume=path) == rows
    assert measured == []


def test_a_spent_budget_leaves_cases_to_go_on_with(tmp_path: Path, measured: list[int]) -> None:
    path = tmp_path / "rows.jsonl"
    rows = go(resume=path, budget_s=-1.0)
    assert {r["contender"] for r in rows} == {"all"}
    rows = go(resume=path, where=["H=32"])
    assert measured == [32]
    # the other cases are not of this run: what is known of them stays
    assert {width(r) for r in rows if r["contender"] == "all"} == {16, 48}
    rows = go(resume=path)
    assert measured == [32, 16, 48]
    assert "all" not in {r["contender"] for r in rows}


def test_a_contender_that_was_left_out_is_measured_when_wanted(
    tmp_path: Path, measured: list[int]
) -> None:
    path = tmp_path / "rows.jsonl"
    go(resume=path, peers=PEERS[:2])
    measured.clear()
    go(resume=path, peers=PEERS[:1])  # all of these have their rows
    assert measured == []
    rows = go(resume=path)
    assert measured == list(WIDTHS)
    ours = [r for r in rows if r["contender"] == "fastlinear"]
    assert len(ours) == len(WIDTHS)
    assert all(r["valid"] for r in ours)


@pytest.mark.parametrize("change", ["commit", "torch", "device", "experiment"])
def test_rows_of_another_run_are_neither_kept_nor_lost(
    change: str, tmp_path: Path, measured: list[int]
) -> None:
    path, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    rows = go(resume=path)
    first = rows[0]
    if change == "experiment":
        first = first | {"experiment": "strassen"}
    else:
        first = first | {"env": first["env"] | {change: "another"}}
    write_rows([first, *rows[1:]], path)
    before = path.read_text()
    with pytest.raises(InputError, match="1 others in"):
        go(resume=path)
    assert path.read_text() == before
    measured.clear()
    merged = go(resume=path, out=other)
    assert measured == [16]  # its row is missing
    assert read_rows(other) == merged
    assert path.read_text() == before


def test_a_line_that_is_no_row_is_named(tmp_path: Path, measured: list[int]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"cut\n{}\n')
    with pytest.raises(InputError, match="line 1"):
        go(resume=path)
    assert measured == []


def test_facts_about_a_gpu_are_read_once_in_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    now = [100.0]

    def read(device: object) -> dict[str, Any]:
        reads.append(device)
        return {"read": len(reads)}

    monkeypatch.setattr(settings_module, "environment", read)
    monkeypatch.setattr(settings_module.time, "monotonic", lambda: now[0])
    gpu, cpu = (Settings(torch.device(d), 5, 1.0) for d in ("cuda", "cpu"))
    assert [gpu.facts()["env"]["read"] for _ in range(3)] == [1, 1, 1]
    now[0] += 6.0
    assert gpu.facts()["env"]["read"] == 2
    assert [cpu.facts()["env"]["read"] for _ in range(2)] == [3, 4]


def test_ceilings_are_measured_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def measure(*_: Any, fresh: bool) -> Ceilings:
        found.append(fresh)
        return Ceilings(2.0, 2.0) if fresh else Ceilings(1.0, 5.0)

    monkeypatch.setattr(ceilings_module, "_measured", measure)
    monkeypatch.setattr(ceilings_module, "_again", {})
    where = torch.device("cpu"), "float32", 1e6
    assert ceilings_module.ceilings_for(*where) == Ceilings(1.0, 5.0)
    for _ in range(3):
        assert ceilings_module.measured_again(Ceilings(1.0, 5.0), *where) == Ceilings(2.0, 5.0)
    assert ceilings_module.ceilings_for(*where) == Ceilings(2.0, 5.0)
    assert found == [False, True, False]
