"""Drawn cases: the same for the same seed, each way of ours verified, regret told as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.drawn import cli, report
from benchmarks.drawn.measure import measured
from fastlinear.calibration import drawn as space
from fastlinear.calibration import ways as arms
from fastlinear.cli.app import app
from fastlinear.core.problem import Problem
from fastlinear.dispatch import backend
from fastlinear.dispatch.backend import family

_MODES = (space.INFERENCE, space.TRAINING)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(space.LIMITS, "cpu", space.Limit(1e6, 1 << 19))


def test_every_family_is_drawn() -> None:
    assert set(space.FAMILIES) == set(backend.names()) - {"experts"}  # which is not timed yet


@pytest.mark.parametrize("name", space.FAMILIES)
@pytest.mark.parametrize("mode", _MODES)
def test_the_same_seed_draws_the_same_and_another_others(name: str, mode: str) -> None:
    first = space.cases(name, 3, 12, "cpu", mode)
    assert first[:5] == space.cases(name, 3, 5, "cpu", mode)
    assert len({c.problem for c in first}) == 12
    others = {c.problem for c in space.cases(name, 4, 12, "cpu", mode)}
    assert not others & {c.problem for c in first}
    for case in first:
        p = case.problem
        assert p.piece == "forward"
        assert p.needs_grad == (mode == space.TRAINING)
        least = family(name).cost(p.with_piece("step") if p.needs_grad else p)
        assert least.flops <= space.LIMITS["cpu"].flops
        assert least.bytes <= space.LIMITS["cpu"].bytes


def test_a_gpu_has_every_second_case_in_a_graph() -> None:
    drawn = space.cases("linear_act", 0, 6, "cuda", space.INFERENCE, ("bfloat16",))
    assert [c.problem.captured for c in drawn] == [False, True] * 3
    assert {c.problem.dtype for c in drawn} == {"bfloat16"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", space.FAMILIES)
@pytest.mark.parametrize("mode", _MODES)
def test_all_ways_of_ours_are_measured_once(name: str, mode: str) -> None:
    (case,) = space.cases(name, 1, 1, "cpu", mode, ("float32",))
    found = measured([case], torch.device("cpu"), env={}, skip=("compile",), budget_s=0.0)
    ((_, row, why),) = found
    assert row is not None, why
    assert not row["failed"]
    ours = [tuple(sorted(a["took"].items())) for a in row["arms"].values() if a["took"]]
    assert len(ours) == len(set(ours)) > 1
    assert set(row["arms"]) >= {"fastlinear", "eager"}
    assert row["explain"]
    assert json.loads(json.dumps(row)) == row


@pytest.mark.usefixtures("small")
def test_what_batch_invariant_calls_cost_is_told_apart() -> None:
    """They are no choice of ours, and no peer: neither regret nor losses count them."""
    picked = [
        space.cases(name, 1, 1, "cpu", m, ("float32",))[0]
        for name in space.FAMILIES
        for m in _MODES
    ]
    how: dict[str, Any] = {"skip": ("compile",), "budget_s": 0.0}
    rows = [
        row for _, row, _ in measured(picked, torch.device("cpu"), env={}, **how, invariant=True)
    ]
    for row in rows:
        assert row is not None
        assert row["failed"] == {}
        assert not row["arms"]["batch_invariant"]["took"]
    fast = _row(own=2.0, eager=4.0, batch_invariant=1.0)
    assert report.outcome(fast).peer == "eager"
    assert report.outcome(fast).best == "fastlinear"
    slow = _row(own=2.0, eager=4.0, batch_invariant=8.0)
    told = report.invariant("layers", [fast, slow, _row(own=1.0, eager=1.0)])
    assert told == ("layers", "2", "1.41", "3.82", "0.71")
    assert report.invariant("layers", [_row(own=1.0, eager=1.0)]) is None


@pytest.mark.usefixtures("small")
def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = arms.ours

    def wrong(*call: Any) -> Any:
        first, *others = right(*call)
        yield first
        yield replace(others[0], name="wrong", call=lambda *c: others[0].call(*c) * 1.5)

    monkeypatch.setattr(arms, "ours", wrong)
    cases = space.cases("linear_act", 1, 1, "cpu", space.INFERENCE, ("float32",))
    ((_, row, _),) = measured(cases, torch.device("cpu"), env={}, skip=("compile",), budget_s=0.0)
    assert row is not None
    assert "wrong" not in row["arms"]
    assert "less accurate" in row["failed"]["wrong"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("always", [False, True])
def test_an_unlucky_draw_is_no_fault(always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm that is over the limit on the first draw of inputs alone, or on all."""
    right, first_x = arms.ours, []

    def rough(y: Any, x: Any) -> Any:
        first_x.append(x)
        return y * (1 + 6e-7) if always or torch.equal(x, first_x[0]) else y

    def unlucky(*call: Any) -> Any:
        first, *others = right(*call)
        yield first
        yield replace(others[0], name="rough", call=lambda x, *c: rough(others[0].call(x, *c), x))

    monkeypatch.setattr(arms, "ours", unlucky)
    cases = space.cases("linear_act", 1, 1, "cpu", space.INFERENCE, ("float32",))
    ((_, row, _),) = measured(cases, torch.device("cpu"), env={}, skip=("compile",), budget_s=0.0)
    assert row is not None
    assert ("rough" in row["failed"]) == always
    assert ("rough" in row["arms"]) != always


@pytest.mark.usefixtures("small")
def test_a_case_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(arms, "inputs_of", fails)
    cases = space.cases("linear_act", 1, 2, "cpu", space.INFERENCE)
    found = [(row, why) for _, row, why in measured(cases, torch.device("cpu"), env={})]
    assert found == [(None, "RuntimeError: no room")] * 2
    assert not list(measured(cases, torch.device("cpu"), env={}, most_seconds=-1.0))


def _row(**us: float) -> dict[str, Any]:
    """A row of arms with these times; those of ours are named ``own…``."""
    (case,) = space.cases("linear_act", 0, 1, "cpu", space.INFERENCE)
    named = {"own": "fastlinear", "own_2": "fastlinear[forward=cpp]"}
    return {
        "family": "linear_act",
        "problem": case.problem.to_json(),
        "metric": "wall",
        "explain": ["forward: eager (why)"],
        "failed": {},
        "arms": {
            named.get(name, name): {
                "took": {"forward": name} if name.startswith("own") else {},
                "us": value,
                "samples_us": [value] * 7,
            }
            for name, value in us.items()
        },
    }


def test_a_call_of_ours_that_is_wrong_is_told_and_not_judged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = _row(eager=1.0, compile=2.0)
    lost["failed"]["fastlinear"] = "less accurate than allowed: result 0"
    cli._show([_row(own=2.0, eager=4.0), lost])
    said = capsys.readouterr().out
    assert "not timed" in said
    assert "less accurate than allowed: result 0" in said
    assert "time over the best peer" in said
    cli._show([lost])
    assert "time over the best peer" not in capsys.readouterr().out


def test_regret_and_losses_are_told() -> None:
    rows = [
        _row(own=2.0, own_2=1.0, eager=1.6, compile=4.0),
        _row(own=1.0, own_2=2.0, eager=1.01, compile=0.5),
    ]
    told = report.summary(rows)
    assert told["cases"] == 2
    assert told["regret"] == pytest.approx(2**0.5)
    assert told["regret_worst"] == 2.0
    assert told["slower_than_eager"] == 1
    assert told["slower_than_peer"] == 2
    assert told["over_eager"] == pytest.approx((1.6 / 2 * 1.01) ** 0.5)
    assert told["over_peer"] == pytest.approx((1.6 / 2 * 0.5) ** 0.5)
    worst = report.worst(rows)
    assert [o.regret for o in worst] == [2.0, 1.0]
    assert worst[0].best == "fastlinear[forward=cpp]"
    assert worst[1].peer == "compile"
    assert sum(int(count) for _, count, _ in report.histogram(rows)) == 2


def test_the_command_measures_and_tells(tmp_path: Path) -> None:
    given = ["bench", "drawn", "--family", "diagonal_linear", "--count", "1", "--mode", "inference"]
    out = tmp_path / "rows.jsonl"
    told = CliRunner().invoke(
        app, [*given, "--skip", "compile", "--rounds", "5", "--out", str(out)]
    )
    assert told.exit_code == 0, told.output
    assert "diagonal_linear, inference" in told.output
    assert "the cases that lose most" in told.output
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["seed"] == 0
    assert row["env"]["torch"] == torch.__version__
    refused = CliRunner().invoke(app, [*given, "--budget", "0"])
    assert refused.exit_code != 0


@pytest.mark.usefixtures("small")
def test_processes_find_the_rows_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = space.cases("diagonal_linear", 5, 3, "cpu", space.INFERENCE)
    how: dict[str, Any] = {"env": {}, "skip": ["compile"], "rounds": 5, "budget_s": 0.01}
    found = measured(cases, torch.device("cpu"), jobs=2, **how)
    rows = {row["index"]: row for _, row, why in found if row is not None and not why}
    assert {i: Problem.from_json(row["problem"]) for i, row in rows.items()} == {
        case.index: case.problem for case in cases
    }
    assert all(set(row["arms"]) >= {"fastlinear", "eager"} for row in rows.values())


def test_a_cpu_measures_one_case_at_a_time() -> None:
    done = CliRunner().invoke(app, ["bench", "drawn", "--jobs", "2", "--count", "1"])
    assert done.exit_code == 2
    assert "--jobs 1 on a CPU" in done.output
