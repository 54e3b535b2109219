"""Experiment ``groups``: its cases, its contenders, and that all of them compute the same."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.contenders import grouped_linear as experiment
from benchmarks.experiments import groups as cases_of
from benchmarks.experiments.groups import plot as groups_plot
from benchmarks.harness import measure as measure_module
from benchmarks.harness.case import Case
from benchmarks.harness.measure import run_case
from benchmarks.harness.plot import plot
from benchmarks.harness.rows import read_rows
from benchmarks.harness.settings import Settings
from fastlinear.core.cost import Ceilings
from fastlinear.core.errors import InputError

SETTINGS = Settings(torch.device("cpu"), rounds=5, budget_s=0.1)
PEERS = {
    *("eager", "loop_scripted", "conv1d", "conv1d_sequences", "conv1d_positions", "bmm"),
    *("baddbmm", "multichannel", "einsum", "vmap", "grouped_mm", "compile_bmm"),
    "compile_einsum",
}


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: Ceilings(1e15, 1e15))


def tiny(direction: str, dtype: str = "float32", activation: str = "relu") -> Case:
    (first, *_) = cases_of.cases("cpu", quick=True)
    sizes = (("M", 6), ("G", 3), ("K", 5), ("N", 4))
    options = (("activation", activation), ("bias", "yes"))
    return dataclasses.replace(first, dims=sizes, direction=direction, dtype=dtype, options=options)


def test_the_cases_are_the_headlines_and_a_grid() -> None:
    found = {
        (c.dim("M"), c.dim("G"), c.dim("K"), c.dim("N"), c.dtype, c.direction)
        for c in cases_of.cases("cuda")
    }
    assert len(found) + 8 == len(cases_of.cases("cuda"))  # eight more without an activation
    for sizes in ((4096, 100, 100, 100), (16384, 64, 64, 64), (16384, 256, 32, 32)):
        for direction in ("forward", "forward+backward"):
            assert (*sizes, "bfloat16", direction) in found
    assert (4096, 100, 100, 100, "float32", "forward") in found
    assert {c.dtype for c in cases_of.cases("cpu")} == {"float32", "bfloat16"}


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_every_contender_is_right(direction: str, activation: str) -> None:
    case = tiny(direction, activation=activation)
    wanted = [p for p in experiment.peers(case) if not p.name.startswith("compile")]
    rows = run_case(case, SETTINGS, wanted)
    assert {r["contender"] for r in rows} >= {n for n in PEERS if not n.startswith("compile")}
    skipped = {r["contender"] for r in rows if r["skipped"]}
    ours = {
        f"fastlinear[{name}]"
        for name in (
            "triton",
            "padded",
            "packed_groups",
            "weight_stationary",
            "wide",
            "planes",
            "cpp",
            "widened",
        )
    }
    assert skipped - ours == {"grouped_mm"}
    assert not torch.cuda.is_available() or "fastlinear[triton]" not in skipped
    for row in rows:
        if not row["skipped"]:
            assert row["valid"], row["contender"]
            assert row["median_us"] > 0
    ours = next(r for r in rows if r["contender"] == "fastlinear")
    assert ours["chosen"]["forward"]
    assert ours["best_peer"] in PEERS


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_contenders_are_right() -> None:
    case = tiny("forward")
    wanted = [p for p in experiment.peers(case) if p.name.startswith("compile") or p.name == "bmm"]
    assert all(r["valid"] for r in run_case(case, SETTINGS, wanted))


def test_a_wrong_contender_is_found() -> None:
    def without_bias(x: Any, weight: Any, bias: Any) -> Any:
        return torch.bmm(x, weight.transpose(1, 2)) + 0 * bias[:, None]

    wrong = experiment._peer("wrong", without_bias, "groups")
    right = experiment._peer("right", experiment._bmm, "groups")
    rows = run_case(tiny("forward"), SETTINGS, [wrong, right])
    (row,) = (r for r in rows if r["contender"] == "wrong")
    assert not row["valid"]
    assert row["median_us"] is None


def test_costs_are_each_tensor_once() -> None:
    for direction, passes, products in (("forward", 1, 1), ("forward+backward", 2, 3)):
        work = experiment.make_work(tiny(direction), torch.device("cpu"))
        cost = work.cost()
        assert cost.bytes == passes * 4 * (6 * 15 + 6 * 12 + 3 * 4 * 5 + 3 * 4)
        assert cost.flops == products * 2 * 6 * 3 * 4 * 5


def test_roundings_of_wide_rows_decide_about_no_contender() -> None:
    """Every token has a feature near relu's kink, and a bias added later rounds once more."""
    sizes = (("M", 64), ("G", 20), ("K", 50), ("N", 64))
    case = dataclasses.replace(tiny("forward+backward", "bfloat16"), dims=sizes)
    wanted = [
        p for p in experiment.peers(case) if p.name in ("eager", "bmm", "einsum", "fastlinear")
    ]
    rows = [r for r in run_case(case, SETTINGS, wanted) if r["metric"] == "wall"]
    assert {r["contender"]: r["valid"] for r in rows} == dict.fromkeys(
        ("eager", "bmm", "einsum", "fastlinear"), True
    )


RESULTS = Path(__file__).parents[2] / "results/nvidia-h200/groups.jsonl.gz"


def test_curves_are_times_over_one_size_with_their_floor() -> None:
    rows = read_rows(RESULTS)
    found = {(c.axis, c.title): c for c in groups_plot.curves(rows)}
    title = "bfloat16 + relu, M=16384, forward, device time"
    curve = found["features of a group (K = N)", title]
    assert curve.groups == {32: 256, 64: 64, 256: 16}
    for k, groups in curve.groups.items():
        same = [
            r
            for r in rows
            if r["case"]["dims"] == {"M": 16384, "G": groups, "K": k, "N": k}
            and (r["case"]["dtype"], r["case"]["options"]["activation"]) == ("bfloat16", "relu")
            and (r["direction"], r["metric"]) == ("forward", "device")
            and r["median_us"]
        ]
        assert {r["roofline"]["floor_us"] for r in same} == {curve.floors[k]}
        named = {r["contender"]: r["median_us"] for r in same if "[" not in r["contender"]}
        assert curve.times[k] == named
        assert min(named.values()) > curve.floors[k]
    assert all(len(c.times) > 1 for c in found.values())


def _moved(rows: list[Any], **sizes: int) -> list[Any]:
    """The rows of one case as those of another."""
    found = []
    for row in rows:
        case = row["case"] | {"dims": row["case"]["dims"] | sizes}
        found.append(row | {"case": case})
    return found


def test_curves_over_the_number_of_groups_and_the_tokens() -> None:
    one = [r for r in read_rows(RESULTS) if r["case"]["dims"]["M"] == 4096]
    one = [r for r in one if r["case"]["dtype"] == "float32" and r["direction"] == "forward"]
    assert not groups_plot.curves(one), "one point is no curve"
    axes = {c.axis: c for c in groups_plot.curves([*one, *_moved(one, G=10), *_moved(one, M=64)])}
    assert set(axes) == {"number of groups", "tokens"}
    assert list(axes["number of groups"].times) == [10, 100]
    assert list(axes["tokens"].times) == [64, 4096]
    assert not axes["tokens"].groups


def test_a_picture_has_the_longest_curve_of_each_kind() -> None:
    rows = read_rows(RESULTS)
    found = groups_plot.drawn(groups_plot.curves(rows))
    assert {c.kind[-1] for c in found} == {"device"}, "on the device where that was measured"
    kinds = [(c.axis, *c.kind) for c in found]
    assert len(kinds) == len(set(kinds)) == 10
    for left, right in zip(found[::2], found[1::2], strict=True):  # beside each other
        assert (left.axis, left.kind[:2]) == (right.axis, right.kind[:2])
        assert (left.kind[2], right.kind[2]) == ("forward", "forward+backward")
    first = next(c for c in found if c.kind[:2] == ("bfloat16", "relu"))
    assert len(first.times) == 12, "not the one of three points"
    wall = [row for row in rows if row["metric"] == "wall"]
    assert {c.kind[-1] for c in groups_plot.drawn(groups_plot.curves(wall))} == {"wall"}
    sizes = (8, 16, 24, 48, 64, 96, 100, 128, 144, 200, 256, 512)
    assert groups_plot._far_apart(sizes) == [8, 16, 24, 48, 96, 144, 256, 512]


def test_sizes_are_compared_at_about_the_same_numbers() -> None:
    rows = [r for r in read_rows(RESULTS) if r["case"]["dims"]["M"] == 16384]
    rows = [r for r in rows if r["case"]["dtype"] == "float16"]
    (other,) = {r["case"]["dims"]["G"] for r in rows if r["case"]["dims"]["K"] == 64}
    small = _moved([r for r in rows if r["case"]["dims"]["K"] == 64], G=4)
    changed = [*(r for r in rows if r["case"]["dims"]["K"] != 64), *small]
    changed += _moved([r for r in rows if r["case"]["dims"]["K"] == 64], M=64)
    changed += _moved([r for r in rows if r["case"]["dims"]["K"] == 32], M=64)
    found = [c for c in groups_plot.curves(changed) if c.axis.startswith("features")]
    assert {c.groups[64] for c in found} == {4, other}
    kept = {c.groups[64] for c in groups_plot.drawn(found)}
    assert kept == {other}, "not 256 numbers beside 4096 and 8192"
    alone = [c for c in found if c.groups[64] == 4]
    assert groups_plot.drawn(alone), "rather such curves than none"


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = plot(read_rows(RESULTS), tmp_path / "groups.svg").read_text()
    for word in ("floor: bytes", "features of a group", "G=256", "fastlinear", "bmm"):
        assert word in text
    assert 10_000 < plot(read_rows(RESULTS), tmp_path / "groups.png").stat().st_size < 200_000
    with pytest.raises(InputError, match="differ in size"):
        groups_plot.plot([], tmp_path / "none.svg")
