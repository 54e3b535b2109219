"""The builder of shipped tables writes what dispatch reads, within its budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.contenders import mlp as chains
from benchmarks.experiments import gated_mlp as gated_cases
from benchmarks.experiments import overhead
from benchmarks.harness.rows import read_rows, write_rows
from benchmarks.harness.run import run
from benchmarks.tables import build as module
from benchmarks.tables import gated_grid
from benchmarks.tables.build import build_table, write_table
from benchmarks.tables.diagonal_grid import diagonal_problems
from benchmarks.tables.grid import published_chains, published_training, table_problems
from fastlinear.core.device import device_facts
from fastlinear.core.errors import InputError
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache, tables
from fastlinear.dispatch.backend import family
from fastlinear.families.linear import padded_problem
from fastlinear.families.linear.problem import (
    BACKWARD_PIECES,
    PIECES,
    STEP,
    WHOLE_BACKWARD,
    problem,
)
from fastlinear.families.linear.selection import select_pieces
from fastlinear.families.linear.triton.config import whole_backward_may_pay
from fastlinear.families.mlp import layerwise
from fastlinear.families.mlp.selection import tuning_order as chain_order

SIZES = (8, 16, 16)


def _problem(piece: str, activation: str = "gelu_tanh", grad: bool = True) -> Problem:
    return problem(
        piece,
        *SIZES,
        dtype="float32",
        device="cpu",
        activation=activation,
        needs_grad=grad,
        precision=torch.get_float32_matmul_precision(),
    )


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget()


def test_dispatch_reads_what_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = [_problem("forward", grad=False), _problem("grad_input"), _problem("grad_pre")]
    data = build_table(wanted, "cpu", rounds=5)
    assert data["failures"] == []
    assert data["left"] == 0
    path = write_table(data, tmp_path / f"{device_facts('cpu').slug}.json")
    assert json.loads(path.read_text()) == data
    monkeypatch.setattr(tables, "_FOLDER", tmp_path)
    tables.table.cache_clear()
    try:
        for p in wanted:
            able = family(p.family).candidates(p.piece)
            row = tables.shipped(p, able)
            assert row is not None
            assert row.best in row.times_us
            assert row.times_us["eager"] > 0
    finally:
        tables.table.cache_clear()
    # nothing reached the user's own cache
    assert not list((tmp_path / "cache").glob("tuned-*"))


def test_pieces_that_ignore_the_activation_are_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[Problem] = []
    real = module.tune

    def counting(p: Problem, **options: object) -> object:
        measured.append(p)
        return real(p, **options)

    monkeypatch.setattr(module, "tune", counting)
    wanted = [_problem(piece, a) for a in ("relu", "silu") for piece in ("grad_weight", "grad_pre")]
    data = build_table(wanted, "cpu", rounds=5)
    assert [p.piece for p in measured] == ["grad_weight", "grad_pre", "grad_pre"]
    assert {Problem.from_json(r["problem"]) for r in data["rows"]} == set(wanted)


def test_a_spent_budget_leaves_the_rest_and_a_table_is_extended() -> None:
    wanted = [_problem("forward", a, grad=False) for a in ("relu", "none")]
    nothing = build_table(wanted, "cpu", budget_s=-1.0)
    assert nothing["rows"] == []
    assert nothing["left"] == 2
    first = build_table(wanted[:1], "cpu", rounds=5)
    both = build_table(wanted, "cpu", rounds=5, extend=first)
    assert both["rows"][0] == first["rows"][0]
    assert len(both["rows"]) == 2
    other = build_table(wanted[:1], "cpu", rounds=5, extend=first | {"torch": "0.1"})
    assert len(other["rows"]) == 1


def test_rows_of_changed_sources_are_measured_again() -> None:
    wanted = [_problem("forward", "relu", grad=False), _problem("grad_input")]
    first = build_table(wanted, "cpu", rounds=5)
    now = first["sources"]["linear_act.forward"]["eager"]
    first["sources"]["linear_act.forward"]["eager"] = "another one"
    first["rows"][0]["times_us"] = {"eager": 1e9}
    # the budget does not reach it: it stays, and says of which state it is
    for extend in (first, build_table(wanted, "cpu", budget_s=-1.0, extend=first)):
        second = build_table(wanted, "cpu", budget_s=-1.0, extend=extend)
        assert [r["problem"]["piece"] for r in second["rows"]] == ["grad_input", "forward"]
        assert second["rows"][1]["sources"] == {"eager": "another one"}
        assert second["sources"]["linear_act.forward"]["eager"] == now
        assert second["left"] == 1
    third = build_table(wanted, "cpu", rounds=5, extend=second)
    assert [r["problem"]["piece"] for r in third["rows"]] == ["grad_input", "forward"]
    assert third["rows"][1]["times_us"]["eager"] < 1e9
    assert not any("sources" in row for row in third["rows"])


def test_a_row_says_what_changed_since(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = _problem("grad_input")
    data = build_table([wanted], "cpu", rounds=5)
    path = tmp_path / f"{device_facts('cpu').slug}.json"
    monkeypatch.setattr(tables, "_FOLDER", tmp_path)
    able = family("linear_act").candidates("grad_input")
    for digest, changed in ((None, False), ("another one", True)):
        if digest is not None:
            data["sources"]["linear_act.grad_input"]["eager"] = digest
        write_table(data, path)
        tables.table.cache_clear()
        row = tables.shipped(wanted, able)
        assert row is not None
        assert row.story().endswith("eager changed since") is changed
    data["sources"] = build_table([], "cpu")["sources"]  # one row is older than its table
    data["rows"][0]["sources"] = {"eager": "another one"}
    write_table(data, path)
    tables.table.cache_clear()
    row = tables.shipped(wanted, able)
    assert row is not None
    assert row.story().endswith("eager changed since")
    tables.table.cache_clear()


def test_a_steps_pieces_are_those_measured_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    real = module.tune

    def watching(p: Problem, **options: object) -> object:
        if p.piece == STEP:
            seen.append({c.source for c in select_pieces(p)})
        return real(p, **options)

    monkeypatch.setattr(module, "tune", watching)
    build_table([_problem(piece) for piece in (*PIECES, STEP)], "cpu", rounds=5)
    assert seen
    assert all(sources == {"tuned"} for sources in seen)


def test_what_noise_leaves_undecided_is_measured_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = _problem("grad_input")
    real, asked = module.tune, []

    def noisy(p: Problem, *, rounds: int, **options: Any) -> Any:
        asked.append(rounds)
        found = real(p, rounds=rounds, **options)
        slow = {n: replace(s, us=tuple(2.0 * u for u in s.us)) for n, s in found.samples.items()}
        one = next(iter(found.samples))
        fast = slow | {one: found.samples[one]}
        other = next(n for n in found.samples if n != one)
        return replace(found, samples=fast, best=other if len(asked) == 1 else one)

    monkeypatch.setattr(module, "tune", noisy)
    data = build_table([wanted], "cpu", rounds=5)
    assert asked == [5, 15]
    (row,) = data["rows"]
    assert row["times_us"][row["best"]] == min(row["times_us"].values())


def test_long_calls_are_measured_once_for_both_regimes() -> None:
    outside = problem("step", *SIZES, dtype="float32", device="cuda", needs_grad=True)
    inside = outside.other_regime()
    assert inside is not None
    for us, bound in ((100.0, False), (401.0, True)):
        times = {outside: {"eager": us, "pieces": us + 50.0}}
        assert module._device_bound(inside, times) is bound
        assert not module._device_bound(outside, times)
    chain = next(p for p in published_training("cuda") if p.piece == STEP and p.dim("L") == 8)
    inside = chain.other_regime()
    for us, bound in ((3000.0, False), (3300.0, True)):  # every layer asks the host for its own
        assert module._device_bound(inside, {chain: {"eager": us}}) is bound


def test_chains_that_train_come_after_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "reason_not", lambda p: None)  # as on a machine with a GPU
    trained = published_training("cuda")
    layers = [p for p in trained if p.family == "linear_act"]
    assert {p.piece for p in layers} == {"forward", *BACKWARD_PIECES, WHOLE_BACKWARD}
    for p in trained:
        if p.family == "mlp":
            needed = layerwise.layer_problems(p)
            assert max(map(trained.index, needed)) < trained.index(p)


def test_where_only_pytorch_can_serve_there_is_no_row() -> None:
    alone = replace(_problem("forward", "relu", grad=False), dtype="float64", precision="")
    data = build_table([alone, _problem("forward", "relu", grad=False)], "cpu", rounds=5)
    assert (data["failures"], data["left"]) == ([], 0)
    (row,) = data["rows"]
    assert Problem.from_json(row["problem"]).dtype == "float32"


def test_a_problem_that_breaks_is_recorded() -> None:
    bad = _problem("forward", "no_such", grad=False)
    data = build_table([bad, _problem("forward", "relu", grad=False)], "cpu", rounds=5)
    (failure,) = data["failures"]
    assert "no_such" in failure["reason"]
    assert len(data["rows"]) == 1


def test_the_grid_covers_the_family_most_important_first() -> None:
    grid = table_problems("cuda")
    assert len(grid) == len(set(grid))
    published = published_chains("cuda")
    assert grid[: len(published)] == published
    assert {p.dim("H") for p in published if p.family == "mlp"} == {*overhead.WIDTHS, 8192, 4095}
    for p in published:
        if p.family == "mlp" and not p.captured:  # its layers are measured before it
            layers = [published.index(q) for q in chain_order(p)[:-1]]
            assert max(layers, default=-1) < published.index(p)
    trained = published_training("cuda")
    assert grid[len(published) :][: len(trained)] == trained
    assert all(p.needs_grad for p in trained)
    assert {p.captured for p in trained} == {True, False}
    assert {p.dim("M") for p in trained} == set(overhead.TRAINED)
    own = [p for p in trained if p.family == "mlp"]
    assert {p.piece for p in own} == {"forward", "backward", "step"}
    assert {p.dim("L") for p in own} == set(overhead.LAYERS)
    assert set(diagonal_problems("cuda")) <= set(grid)
    left_out = {*published, *trained, *diagonal_problems("cuda")}
    grid = [p for p in grid if p not in left_out and p.family != "gated_mlp"]
    first = grid[0]
    assert (first.dim("M"), first.dim("K"), first.dim("N")) == (8192, 768, 3072)
    assert (first.dtype, first.option("activation")) == ("bfloat16", "gelu_tanh")
    assert {p.dtype for p in grid} == {"bfloat16", "float16", "float32"}
    assert {p.option("w") for p in grid} == {"nk", "kn"}
    chains = [p for p in grid if p.family == "mlp"]
    assert {p.piece for p in chains} == {"forward", "backward", "step"}
    assert {p.dim("L") for p in chains} == {8, 4, 2}
    assert {p.dim("L") for p in published if p.family == "mlp"} == {8, 4, 2, 1}
    grid = [p for p in grid if p.family == "linear_act"]
    assert {p.piece for p in grid} == {*PIECES, WHOLE_BACKWARD, STEP}
    whole = [p for p in grid if p.piece == WHOLE_BACKWARD]
    aligned = [p for p in whole if padded_problem.aligned(p)]
    assert all(whole_backward_may_pay(*(p.dim(n) for n in ("M", "K", "N"))) for p in aligned)
    assert {p.captured for p in grid} == {True, False}
    for p in grid[:2000]:
        if p.piece == STEP:  # its pieces are measured before it
            places = [grid.index(p.with_piece(piece)) for piece in PIECES]
            assert max(places) < grid.index(p)
    assert {p.option("activation") for p in grid} == {"gelu_tanh", "gelu", "relu", "silu", "none"}
    assert {1, 4, 16, 64, 256, 1024, 4096, 16384, 65536} <= {p.dim("M") for p in grid}
    assert {p.needs_grad for p in grid if p.piece == "forward"} == {True, False}


def test_the_grid_has_the_gated_mlps_of_published_models() -> None:
    grid = [p for p in table_problems("cuda") if p.family == "gated_mlp"]
    kinds = ("dtype", "piece", "needs_grad", "captured")
    seen = {tuple(getattr(p, k) for k in kinds) for p in grid}
    pieces = (("forward", False), ("forward", True), ("backward", True), ("step", True))
    dtypes, regimes = ("bfloat16", "float32", "float16"), (False, True)
    assert seen == {(d, *piece, c) for d in dtypes for piece in pieces for c in regimes}
    assert {p.option("order") for p in grid} == {"apart", "gate_up"}
    assert {p.option("bias") for p in grid} == {"yes", "no"}
    assert {1, 16, 64, 256, 4096, 16384} <= {p.dim("M") for p in grid}
    sizes = {(p.dim("K"), p.dim("H"), p.option("activation")) for p in grid}
    assert sizes == set(gated_cases.MODELS.values())
    first = grid[0]
    assert (first.dim("M"), first.dtype, first.option("order")) == (4096, "bfloat16", "apart")
    for p in grid[:400]:
        if p.piece == STEP:  # its pieces are measured before it
            own = [grid.index(p.with_piece(piece)) for piece in ("forward", "backward")]
            assert max(own) < grid.index(p)
    asked = table_problems("cuda")
    decisive = {asked.index(p) for p in grid[:40]}
    assert max(decisive) < len(asked) / 2, "among the layers, not behind them"


def test_gated_mlps_become_rows_that_dispatch_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = {"tiny": (16, 64, "silu")}
    monkeypatch.setattr(gated_grid, "MODELS", small)
    monkeypatch.setattr(gated_grid, "_TOKENS", {64: 0.0})
    wanted = [p for _, _, p in gated_grid.gated_problems("cpu") if p.dtype == "float32"]
    assert {p.piece for p in wanted} == {"forward", "backward", "step"}
    data = build_table(wanted, "cpu", rounds=5)
    assert (data["failures"], data["left"]) == ([], 0)
    write_table(data, tmp_path / f"{device_facts('cpu').slug}.json")
    monkeypatch.setattr(tables, "_FOLDER", tmp_path)
    tables.table.cache_clear()
    try:
        for p in wanted:
            row = tables.shipped(p, family(p.family).candidates(p.piece))
            assert row is not None
            assert set(row.times_us) >= {"eager"}
        akin = replace(
            wanted[0],
            options=tuple((k, "relu" if k == "activation" else v) for k, v in wanted[0].options),
        )
        assert tables.shipped(akin, family(akin.family).candidates(akin.piece)) is not None
    finally:
        tables.table.cache_clear()


def test_a_grid_of_chains_becomes_rows_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (case, *_) = overhead.cases("cpu", quick=True)
    arms = ["eager", "hand_loop", "fastlinear", "fastlinear[layerwise]"]
    how = {"where": ["direction=forward"], "peers": arms, "rounds": 5}
    rows = run("overhead", quick=True, only=case.problem, **how)
    cell = chains.problem_of(case)
    stale = {"problem": cell.to_json(), "best": "eager", "times_us": {"eager": 1.0}}
    other = {
        "problem": replace(cell, dtype="bfloat16").to_json(),
        "best": "eager",
        "times_us": {"eager": 2.0, "layerwise": 3.0},
        "sources": {"layerwise": "of old"},
    }
    data = build_table([], "cpu", rounds=5) | {"rows": [stale, other]}
    path = write_table(data, tmp_path / "table.json")
    file = write_rows(rows, tmp_path / "rows.jsonl.gz")
    assert main(["table", "--rows", str(file), "--out", str(path)]) == 0
    kept = json.loads(path.read_text())["rows"]
    assert len(kept) == 2
    by_dtype = {row["problem"]["dtype"]: row for row in kept}
    assert by_dtype["bfloat16"] == other  # still as measured by older sources
    mine = by_dtype["float32"]
    times = {r["contender"]: r["median_us"] for r in rows if r["metric"] == "wall"}
    assert mine["times_us"] == pytest.approx(
        {"eager": times["eager"], "layerwise": times["fastlinear[layerwise]"]}, abs=1e-3
    )
    assert mine["best"] in mine["times_us"]
    slow = [dict(r, samples_us=[9e9] * 5) for r in rows if r["contender"] != "eager"]
    eager = [r for r in rows if r["contender"] == "eager"]
    assert module.with_rows(data, [*eager, *slow])["rows"][0]["best"] == "eager"
    assert module.with_rows(data, [*slow, *eager])["rows"][0]["best"] == "eager"
    for bad, what in (([], "without any"), (slow, "without any")):
        with pytest.raises(InputError, match=what):
            module.with_rows(data, bad)
    # rows of a GPU on a machine without one: what served there is in the table
    gpu = [
        r | {"case": r["case"] | {"device": "cuda"}} | ({} if name is None else {"contender": name})
        for name in (None, "fastlinear[whole_cuda]", "fastlinear[strassen]")
        for r in rows
        if name is None or r["contender"] == "fastlinear[layerwise]"
    ]
    taken = module.with_rows(data, gpu)["rows"][0]
    assert taken["problem"]["device"] == "cuda"
    assert set(taken["times_us"]) == {"eager", "layerwise", "whole_cuda"}
    foreign = [r | {"env": r["env"] | {"torch": "1.0"}} for r in read_rows(file)]
    with pytest.raises(InputError, match=r"with torch 1\.0"):
        module.with_rows(data, foreign)
    assert main(["table", "--rows", str(file), "--out", str(tmp_path / "none.json")]) == 2
    assert "existing table" in capsys.readouterr().err


def test_filters_that_leave_nothing_are_an_error() -> None:
    with pytest.raises(InputError, match="filters that together leave at least one of the") as e:
        run("linear", only="no such case")
    assert "cases of linear" in str(e.value)
