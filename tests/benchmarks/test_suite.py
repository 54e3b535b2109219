"""The suite of model families: the registry, what a row says, and its summary."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.suite import callers, child, measure, outcomes, registry, summary, verify
from benchmarks.suite.family import Family
from benchmarks.suite.measure import How, Row
from benchmarks.suite.registry import FAMILIES, KINDS
from benchmarks.suite.work import ASKED, case_of, make_work
from fastlinear.core.inputs import normalize_inputs
from fastlinear.core.timing import Samples
from fastlinear.profile.step import loss_of
from tests.benchmarks.suite_families import CPU, QUICK, SMALL, set_ceilings, small


@pytest.fixture
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ceilings(monkeypatch)


def test_there_are_many_families_with_names_and_kinds_of_their_own() -> None:
    assert len(FAMILIES) >= 60
    assert all(name == family.name for name, family in FAMILIES.items())
    assert {family.kind for family in FAMILIES.values()} == set(KINDS)
    assert sum(len(file.FAMILIES) for file in registry._FILES) == len(FAMILIES)  # no name twice


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_runs_and_its_loss_reaches_parameters(name: str) -> None:
    family = FAMILIES[name]
    if (why := family.why_not()) is not None:
        pytest.skip(why)
    model, inputs = family.built(0)
    torch.manual_seed(7)  # the caller's own draws change nothing
    again, others = family.built(0)
    state = again.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    args, named = normalize_inputs(inputs, "test")
    with torch.no_grad():
        first = verify.tensors_of(model.eval()(*args, **named))
        args, named = normalize_inputs(others, "test")
        second = verify.tensors_of(again.eval()(*args, **named))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loss = loss_of(model.train()(*args, **named))
    loss.backward()
    graded = [p for p in model.parameters() if p.grad is not None and bool(p.grad.any())]
    assert math.isfinite(float(loss.detach()))
    assert len(graded) >= len([p for p in model.parameters() if p.requires_grad]) // 2


@pytest.mark.usefixtures("known_ceilings")
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_a_row_says_what_became_of_the_linears_and_of_the_time(mode: str) -> None:
    how = How(**{**QUICK.__dict__, "mode": mode})
    row = child.row_of(SMALL, how)
    assert row["status"] == "measured", row["error"]
    assert row.keys() == (measure.blank(SMALL, how) | {"env": 0, "created": 0}).keys()
    assert sum(row["outcomes"].values()) == len(row["sites"]) == 2
    assert row["flops"]["linear"] == 2 * 32 * (8 * 16 + 16 * 4)
    assert row["verified"] is True
    assert row["verdicts"] > (5 if mode == "train" else 1)  # gradients are among them
    assert set(row["arms"]) == {"eager", "fastlinear"}
    assert (row["ours"], row["best_peer"]) == ("fastlinear", "eager")
    assert {"torch", "threads", "commit"} <= row["env"].keys()
    assert json.loads(json.dumps(measure.finite(row), allow_nan=False))


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_a_step_in_training_leaves_gradients_alone_of_this_step(mode: str) -> None:
    work = make_work(SMALL, case_of(SMALL, "cpu", "float32", mode, 0), CPU, 0.5)
    unit = work.unit(work.model)
    found = []
    for _ in range(2):
        with work.mode():
            unit(0)
        found.append([p.grad for p in work.model.parameters()])
    assert all((g is None) == (mode == "inference") for g in found[0])
    if mode == "train":
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(torch.relu(y) if y.sum() > 0 else y)


@pytest.mark.usefixtures("known_ceilings")
def test_forwards_that_cannot_be_traced_are_told_with_their_flops() -> None:
    model = nn.Sequential(Branching(), nn.Linear(4, 4))
    (one,) = callers.untraced(model, torch.randn(2, 8), "inference")
    assert (one["sites"], one["modules"]) == (2, ["Branching"])
    assert one["flops"] == 2 * 2 * (8 * 16 + 16 * 4)
    assert "it decides by a tensor's values or sizes" in one["reason"]
    assert callers.untraced(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8), "train") == []


def test_ours_is_what_all_options_kept_against_the_fastest_peer() -> None:
    def samples(name: str, us: float) -> Samples:
        return Samples(name, (us,) * 5, "wall", 1, "clock")

    times = {"eager": 100.0, "compile": 80.0, "fastlinear": 60.0, ASKED: 40.0}
    row = measure.compared({name: samples(name, us) for name, us in times.items()})
    assert (row["ours"], row["best_peer"]) == (ASKED, "compile")
    assert row["ratio_to_best"] == pytest.approx(0.5)
    assert row["ratio_to_eager"] == pytest.approx(0.4)
    del times[ASKED]
    row = measure.compared({name: samples(name, us) for name, us in times.items()})
    assert (row["ours"], row["ratio_to_best"]) == ("fastlinear", pytest.approx(0.75))


def test_outcomes_in_words_and_gains() -> None:
    assert outcomes.label("refused", "untraceable") == "cannot be traced"
    assert outcomes.label("rejected", "slower_model") == "slower"
    assert outcomes.label("nothing_to_do", "eager_is_best") == "nothing to do"
    sites = [
        {"outcome": "kept", "predicted_us": 3.0, "measured_us": 2.0},
        {"outcome": "kept", "predicted_us": 3.0, "measured_us": -2.0},
        {"outcome": "kept", "predicted_us": None, "measured_us": 2.0},
        {"outcome": "slower", "predicted_us": 3.0, "measured_us": 2.0},
    ]
    assert outcomes.calibration(sites) == [1.5]


def made(name: str, **more: Any) -> Row:
    row = measure.blank(Family(name, "tests", small, more.pop("needs", "")), How())
    return row | {"seconds": {"total": 1.0}} | more


def timed(name: str, ours: float, eager: float, **more: Any) -> Row:
    arms = {
        n: {"us": us, "samples_us": [us] * 5} for n, us in (("fastlinear", ours), ("eager", eager))
    }
    ratio = ours / eager
    told = {"ratio_to_best": ratio, "ratio_ci95": [ratio - 0.01, ratio + 0.01]}
    told |= {"ratio_to_eager": ratio, "best_peer": "eager", "ours": "fastlinear"}
    return made(name, arms=arms, verified=True, **told, **more)


def flops(linear: float, untraced: float, other: float = 0.0) -> dict[str, float]:
    return {"linear": linear, "kept": 0.0, "untraced": untraced, "not_followed": other}


ROWS = [
    timed(
        "a",
        50.0,
        100.0,
        needs="transformers",
        flops=flops(100.0, 60.0, 100.0),
        callers=[{"reason": "A.forward loops (line 3, in A.forward).", "flops": 80.0}],
    ),
    timed(
        "b",
        200.0,
        100.0,
        needs="transformers",
        flops=flops(10.0, 0.0),
        callers=[{"reason": "B.forward loops.", "flops": 5.0}],
    ),
    timed("c", 102.5, 100.0, flops=flops(1e9, 1e9), calibration=[0.69, 0.7, 1.4, 1.41]),
    timed("d", 104.0, 100.0, outcomes={"kept": 3, "slower": 1}, calibration=[1.0]),
    made("e", status="crashed", error={"stage": "process", "message": "signal SIGSEGV"}),
    made("f", verified=False, wrong=["fastlinear: output[0]: error 1"]),
]


def test_the_summary_adds_up() -> None:
    told = summary.summary(ROWS)
    assert told["status"] == {"measured": 5, "crashed": 1}
    assert (told["rows"], told["timed"], told["wrong"], told["kept"]) == (6, 4, 1, 3)
    assert told["behind"] == 2  # b and d; the interval of c begins at 1.015
    assert told["over_best_peer"] == pytest.approx((2 * 0.5 / 1.025 / 1.04) ** 0.25)
    assert told["out_of_reach"] == pytest.approx(0.3)  # of a and b alone
    assert told["callers"] == pytest.approx(0.65)
    assert told["not_followed"] == pytest.approx(0.25)
    assert (told["calibrated"], told["predicted"]) == (3, 5)


def test_the_tables_and_notes_say_so() -> None:
    ((kind, mode, count, over_eager, *_),) = summary.by_kind(ROWS)
    assert (kind, mode, count) == ("tests", "inference", "4")
    assert over_eager == "0.98"
    lines = summary.lines(ROWS)
    assert all(len(line) == len(summary.COLUMNS) for line in lines)
    assert lines[1][7] == "2.00 behind"
    assert "SIGSEGV" in lines[4][2]
    assert lines[5][8] == "WRONG"
    notes = "\n".join(summary.notes(ROWS))
    assert "behind: b, inference: 2.000 of eager" in notes
    assert "behind: c" not in notes
    assert "30% of linear flops ended as cannot be traced, 65% lie in forwards" in notes
    assert "families of transformers" not in "".join(summary.notes(ROWS[2:]))
    assert "cannot be traced: a, inference (80%); b, inference (50%): its forward loops." in notes
    assert "crashed: e, inference: process: signal SIGSEGV" in notes
    assert "wrong: f, inference: fastlinear: output[0]: error 1" in notes
