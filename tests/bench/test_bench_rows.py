"""Rows: schema, roofline flag, ratios to the best valid peer, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastlinear.bench import behind, read_rows, rows, write_rows
from fastlinear.bench.case import Case
from fastlinear.core.compare import Verdict
from fastlinear.core.cost import Ceilings, Cost
from fastlinear.core.errors import InputError
from fastlinear.core.timing import Samples

CASE = Case(
    "linear",
    "linear_act",
    (("M", 2), ("K", 3), ("N", 4), ("L", 1)),
    "float32",
    "cpu",
    "forward",
    ("wall",),
    (("activation", "relu"), ("bias", "yes")),
)
GOOD = [Verdict("output", 1e-7, 1e-7, 3e-7)]
WRONG = [Verdict("output", 1e-7, 1e-7, 3e-7), Verdict("grad.x", float("inf"), 1e-7, 3e-7)]


def _samples(name: str, *us: float) -> Samples:
    return Samples(name, us, "wall", 1, "clock")


def _row(name: str, verdicts: list[Verdict] | None = None) -> rows.Row:
    return rows.judged(rows.blank(CASE, name, "wall", {"env": {}}), verdicts or GOOD)


def test_names_say_what_is_computed() -> None:
    assert CASE.problem == "relu M2 K3 N4 float32"
    assert CASE.name == "relu M2 K3 N4 float32 forward"


def test_the_worst_tensor_decides_and_infinity_stays_json() -> None:
    row = _row("peer", WRONG)
    assert not row["valid"]
    assert row["error"] is None
    assert [v["passed"] for v in row["verdicts"]] == [True, False]
    json.loads(rows.to_line(row))
    assert _row("peer")["valid"]
    assert _row("peer")["error"] == 1e-7


def test_a_time_below_the_floor_is_flagged_and_one_above_is_not() -> None:
    cost, ceilings = Cost(flops=1e6, bytes=1.0), Ceilings(flops_per_s=1e12, bytes_per_s=1e12)
    fine = rows.timed(_row("a"), _samples("a", 2.0, 2.0, 2.0), cost, ceilings)
    assert fine["roofline"]["fraction"] == pytest.approx(0.5)
    assert fine["roofline"]["floor_us"] == pytest.approx(1.0)
    assert fine["roofline"]["bound"] == "compute"
    assert fine["roofline_error"] is None
    wrong = rows.timed(_row("a"), _samples("a", 0.5, 0.5, 0.5), cost, ceilings)
    assert "200%" in wrong["roofline_error"]


def test_ratio_is_to_the_fastest_valid_peer_and_ours_is_no_peer() -> None:
    samples = {
        "eager": _samples("eager", 10.0, 12.0, 11.0),
        "fast": _samples("fast", 5.0, 6.0, 5.5),
        "cheat": _samples("cheat", 1.0, 1.0, 1.0),
        "fastlinear": _samples("fastlinear", 2.5, 3.0, 2.75),
    }
    made = [_row("eager"), _row("fast"), _row("cheat", WRONG), _row("fastlinear")]
    by_name = {r["contender"]: r for r in rows.compared(made, samples)}
    assert by_name["fastlinear"]["best_peer"] == "fast"
    assert by_name["fastlinear"]["ratio_to_best"] == pytest.approx(0.5)
    assert by_name["eager"]["ratio_to_best"] == pytest.approx(2.0)
    assert by_name["fast"]["ratio_to_best"] == pytest.approx(1.0)
    assert by_name["cheat"]["ratio_to_best"] is None
    low, high = by_name["fastlinear"]["ratio_ci95"]
    assert low <= 0.5 <= high


def test_behind_finds_losses_beyond_noise_only() -> None:
    def ours(low: float, name: str = "fastlinear", metric: str = "wall") -> rows.Row:
        row = _row(name) | {"ratio_to_best": low + 0.01, "ratio_ci95": [low, low + 0.02]}
        return row | {"metric": metric}

    cells = [ours(1.01), ours(1.10), ours(1.5, "eager"), ours(0.5)]
    cells = [r | {"problem": str(i)} for i, r in enumerate(cells)]
    assert behind(cells) == [cells[1]]


def test_a_recording_answers_for_its_own_case_and_to_replays_only() -> None:
    def row(name: str, us: float, low: float | None = None, metric: str = "wall") -> rows.Row:
        ratio = {} if low is None else {"ratio_to_best": low, "ratio_ci95": [low, low + 0.02]}
        return _row(name) | {"median_us": us, "metric": metric} | ratio

    late, recorded = row("fastlinear", 5.0, 1.6), row("fastlinear_cuda_graph", 3.0, 0.9)
    graph, eager = row("cublaslt_cuda_graph", 3.1), row("eager", 20.0)
    assert behind([graph, eager, late, recorded]) == []
    assert behind([graph, eager, late, recorded], called=True) == [late]
    assert behind([graph, row("eager", 4.0), late, recorded]) == [late]  # a plain call is faster
    assert behind([graph, eager, late, row("fastlinear_cuda_graph", 4.0, 1.3)]) == [late]
    assert behind([graph, eager, late]) == [late]
    device = row("fastlinear", 5.0, 1.6, "device")
    assert behind([device, recorded]) == [device]
    other = late | {"problem": "another"}
    assert behind([other, recorded]) == [other]


def test_files_keep_rows_and_bad_lines_are_named(tmp_path: Path) -> None:
    path = write_rows([_row("eager"), _row("peer", WRONG)], tmp_path / "new" / "rows.jsonl")
    assert [r["contender"] for r in read_rows(path)] == ["eager", "peer"]
    path.write_text(path.read_text() + '{"cut')
    with pytest.raises(InputError, match="line 3"):
        read_rows(path)
    path.write_text('{"other": 1}\n')
    with pytest.raises(InputError, match="line 1"):
        read_rows(path)


def test_compressed_files_are_rows_as_well_and_damage_is_named(tmp_path: Path) -> None:
    row = {"contender": "eager", "metric": "wall", "samples_us": list(range(100))}
    path = write_rows([row, row | {"contender": "peer"}], tmp_path / "rows.jsonl.gz")
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    with rows.opened(path, "a") as file:
        file.write(rows.to_line(row | {"contender": "third"}))
    assert [r["contender"] for r in read_rows(path)] == ["eager", "peer", "third"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # killed while it was written
    with pytest.raises(InputError, match="EOFError"):
        read_rows(path)
    assert [r["contender"] for r in read_rows(path, cut=True)][:2] == ["eager", "peer"]
    for damaged in (b"no gzip at all", whole[:12] + bytes(8) + whole[20:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="a whole JSONL file"):
            read_rows(path, cut=True)
