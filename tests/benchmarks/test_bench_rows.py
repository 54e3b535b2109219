"""Rows: schema, roofline flag, ratios to the best valid peer, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import ceilings, rows, terms
from benchmarks.harness.case import Case
from benchmarks.harness.notes import notes_behind
from benchmarks.harness.rows import behind, read_rows, write_rows
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


def test_ours_is_held_against_peers_on_its_terms() -> None:
    names = ("eager", "cublaslt", "onednn_prepacked", "cuda_graph", "fastlinear")
    samples = {n: _samples(n, us, us) for n, us in zip(names, (9, 2, 1, 3, 4), strict=True)}
    samples["fastlinear_cuda_graph"] = _samples("fastlinear_cuda_graph", 3.5, 3.5)
    made = {r["contender"]: r for r in rows.compared(list(map(_row, samples)), samples)}
    assert made["fastlinear"]["best_peer"] == "eager"
    assert made["fastlinear_cuda_graph"]["best_peer"] == "cuda_graph"
    assert made["cublaslt"]["best_peer"] == "onednn_prepacked"
    assert made["fastlinear"]["terms"] == []
    assert made["cublaslt"]["terms"] == [terms.NAN_LOST]
    few = {n: samples[n] for n in ("cublaslt", "fastlinear")}
    made = {r["contender"]: r for r in rows.compared(list(map(_row, few)), few)}
    assert made["fastlinear"]["best_peer"] == "cublaslt", "there is no other"


def _timed(name: str, us: float, best: str = "", low: float | None = None, **more: Any) -> rows.Row:
    ratio = {} if low is None else {"ratio_to_best": low, "ratio_ci95": [low, low + 0.02]}
    times = {"median_us": us, "ci95_us": [0.9 * us, 1.1 * us], "best_peer": best}
    return _row(name) | times | ratio | more


def test_behind_finds_losses_beyond_noise_only() -> None:
    cells = []
    for i, low in enumerate((1.01, 1.10, 0.5)):
        cell = [_timed("fastlinear", 5.0, "eager", low), _timed("eager", 4.0)]
        cells += [r | {"problem": str(i)} for r in cell]
    assert behind(cells) == [cells[2]]
    assert behind([_timed("eager", 5.0, "other", 2.0), _timed("other", 1.0)]) == []
    memory = [r | {"metric": "peak_memory"} for r in cells]
    assert behind(memory) == []


def test_losses_within_noise_are_counted_apart() -> None:
    """A ratio above 1.02 whose interval reaches below is none of ``behind``, and is told."""
    cells = []
    for i, (ratio, low) in enumerate(((1.27, 0.98), (1.17, 1.01), (1.10, 1.05), (1.01, 0.99))):
        own = _timed("fastlinear", 5.0, "eager", low) | {"ratio_to_best": ratio}
        cells += [r | {"problem": str(i)} for r in (own, _timed("eager", 4.0))]
    assert [r["problem"] for r in behind(cells)] == ["2"]
    assert [r["problem"] for r in rows.behind_within_noise(cells)] == ["0", "1"]
    head, open_, line, own = notes_behind(cells)
    assert head.endswith("on its terms, beyond noise, in 1 measurements")
    reach = "up to 1.270, by intervals that reach below 1.02"
    assert open_ == f"  2 more read so within noise ({reach})"
    assert line == "  2 forward wall: 1.100 of eager"
    assert own.endswith("a backend of ours, beyond noise, in 0 measurements")


def test_where_the_paired_ratio_was_formed_with_a_peer_on_other_terms() -> None:
    own = _timed("fastlinear", 5.0, "cublaslt", 2.0)
    assert behind([own, _timed("cublaslt", 2.5), _timed("eager", 4.5)]) == []
    (late,) = behind([own, _timed("cublaslt", 2.5), _timed("eager", 4.0)])
    assert (late["best_peer"], late["ratio_to_best"]) == ("eager", 1.25)
    assert behind([own, _timed("cublaslt", 2.5)]) == [], "nobody on its terms"
    assert behind([own, _timed("eager", 4.0, valid=False)]) == []


def test_the_best_peer_is_on_the_terms_of_the_row() -> None:
    cell = [
        _timed("eager", 40.0),
        _timed("fastlinear", 10.0),
        _timed("fastlinear_cuda_graph", 6.0),
        _timed("cuda_graph", 5.0),
        _timed("onednn", 4.0) | {"valid": False},
    ]
    found = {r["contender"]: rows.best_peer(r, cell) for r in cell}
    named = {name: None if best is None else best["contender"] for name, best in found.items()}
    assert named == {
        "eager": "eager",
        "fastlinear": "eager",
        "fastlinear_cuda_graph": "cuda_graph",
        "cuda_graph": "cuda_graph",
        "onednn": None,
    }
    assert rows.ratio(cell[1], cell[0]) == 0.25  # of medians: these have no samples
    paired = [_timed("fastlinear", 10.0, samples_us=[1.0, 30.0, 2.0])]
    paired += [_timed("eager", 40.0, samples_us=[2.0, 90.0, 8.0])]
    assert rows.ratio(*paired) == pytest.approx(1 / 3)
    assert rows.ratio(cell[0], None) is None
    assert rows.ratio(cell[4], cell[0]) is None


def test_a_form_answers_for_peers_on_its_terms() -> None:
    late, recorded = _timed("fastlinear", 5.0, "x", 1.6), _timed("fastlinear_cuda_graph", 3.0)
    graph, eager = _timed("cuda_graph", 3.1), _timed("eager", 20.0)
    assert behind([graph, eager, late, recorded]) == []
    (found,) = behind([graph, _timed("eager", 4.0), late, recorded])  # a plain call is faster
    assert (found["contender"], found["best_peer"]) == ("fastlinear", "eager")
    (found,) = behind([graph, eager, late, _timed("fastlinear_cuda_graph", 4.0)])
    assert (found["contender"], found["best_peer"]) == ("fastlinear_cuda_graph", "cuda_graph")
    (found,) = behind([graph, eager, late])  # no form to answer
    assert (found["contender"], found["best_peer"]) == ("fastlinear", "cuda_graph")
    assert behind([late | {"problem": "another"}, graph, eager, recorded]) == []


@pytest.mark.parametrize(
    ("contender", "case", "found"),
    [
        ("eager", {}, set()),
        ("cublaslt", {"options": {"activation": "gelu_tanh"}}, set()),
        ("cublaslt_cuda_graph", {"options": {"activation": "relu"}}, {"NAN_LOST", "REPLAYED"}),
        ("onednn", {"options": {"activation": "relu"}}, {"NAN_LOST"}),
        ("onednn_prepacked", {"options": {"activation": "gelu"}}, {"PACKED"}),
        ("compile_reduce_overhead", {"experiment": "overhead"}, set()),
        ("compile_reduce_overhead", {"experiment": "models"}, {"COMPILED", "REPLAYED"}),
        ("fastlinear_reduce_overhead", {"experiment": "models"}, {"COMPILED", "REPLAYED"}),
        ("compile_max_autotune", {"experiment": "models", "device": "cpu"}, {"COMPILED"}),
        ("compile", {"experiment": "linear"}, set()),
        ("fastlinear_compile", {"experiment": "models"}, {"COMPILED"}),
        ("compile_stacked", {"experiment": "gated-mlp"}, {"STACKED"}),
        ("liger", {"experiment": "gated-mlp"}, set()),
        ("baddbmm", {"experiment": "groups"}, {"GROUPS_FIRST"}),
        ("fastlinear_channels", {"experiment": "groups"}, {"CHANNELS_FIRST"}),
        ("fastlinear_sequences", {"experiment": "groups"}, {"SEQUENCES"}),
        ("conv1d_sequences", {"experiment": "groups"}, {"SEQUENCES"}),
        ("einsum", {"experiment": "groups"}, set()),
        ("eager", {"experiment": "ragged", "device": "cuda"}, {"LAID_OUT"}),
        ("eager", {"experiment": "ragged", "device": "cpu"}, set()),
        ("grouped_mm", {"experiment": "ragged", "device": "cuda"}, set()),
        ("padded_bmm", {"experiment": "unequal", "device": "cpu"}, {"LAID_OUT"}),
        ("make_graphed_callables", {"experiment": "graphed"}, {"REPLAYED", "UNCHECKED"}),
        ("fastlinear_reusing", {"experiment": "graphed"}, {"REPLAYED"}),
        ("hand_loop", {"experiment": "overhead", "direction": "forward"}, {"REPLAYED"}),
        ("hand_loop", {"direction": "forward+backward"}, {"REPLAYED", "BY_HAND"}),
    ],
)
def test_terms(contender: str, case: dict[str, Any], found: set[str]) -> None:
    assert terms.terms(contender, case) == {getattr(terms, name) for name in found}


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


def test_an_error_of_the_roofline_says_why() -> None:
    cost, limits = Cost(flops=0.0, bytes=1e6), Ceilings(flops_per_s=1e12, bytes_per_s=1e12)
    env = {"env": {"cache_bytes": 1 << 25}, "cold_l2": False}
    fast = rows.timed(_row("a") | env, _samples("a", 0.5, 0.5, 0.5), cost, limits)
    assert fast["roofline_error"].startswith(
        "200% of the measured ceiling (memory): its bytes come"
    )
    many = Cost(flops=0.0, bytes=1e9)
    slow = rows.timed(_row("a") | env, _samples("a", 500.0, 500.0, 500.0), many, limits)
    assert "the least cost is wrong" in slow["roofline_error"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_ceilings_are_of_no_more_bytes_than_the_work(kind: str) -> None:
    device, least = torch.device(kind), 1 << (22 if kind == "cuda" else 14)
    for size in (1.0, 5e6, 2.0**24, 2.0**24 + 64, 1e12):
        found = ceilings._size(device, size)
        assert found <= max(size, least)
        assert 2 * found > min(size, 1 << 26)
