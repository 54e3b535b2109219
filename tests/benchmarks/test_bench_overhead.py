"""Experiment ``overhead``: every cell and contender, limits of error, heat maps."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.contenders.mlp import peers, problem_of
from benchmarks.experiments import EXPERIMENTS, overhead
from benchmarks.experiments.overhead.headroom import best_rates, headroom, markdown
from benchmarks.experiments.overhead.heat import heatmap, heats, print_heat
from benchmarks.harness import measure as measure_module
from benchmarks.harness.case import Case
from benchmarks.harness.measure import Settings, run_case
from benchmarks.harness.peer import Peer
from benchmarks.harness.plot import plot
from benchmarks.harness.rows import read_rows
from benchmarks.harness.run import run
from benchmarks.harness.work import make_work, plain
from fastlinear.core.cost import Ceilings
from fastlinear.core.errors import InputError
from fastlinear.families.mlp.problem import widths_of

run_module = sys.modules["benchmarks.harness.run"]
SETTINGS = Settings(torch.device("cpu"), rounds=5, budget_s=0.2)


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: Ceilings(1e15, 1e15))


def tiny(layers: int = 2, batch: int = 4, width: int = 16) -> Case:
    (first, *_) = overhead.cases("cpu", quick=True)
    return dataclasses.replace(first, dims=(("M", batch), ("L", layers), ("H", width)))


def _copy(row: dict[str, Any], contender: str, us: float, h: int = 16) -> dict[str, Any]:
    case = row["case"] | {"dims": {"L": 2, "M": 4, "H": h}}
    return row | {"contender": contender, "median_us": us, "case": case}


def test_the_grid_is_the_documents_and_more() -> None:
    for device in ("cuda", "cpu"):
        cells = {(c.dim("L"), c.dim("M"), c.dim("H")) for c in overhead.cases(device)}
        document = {
            (n, m, h)
            for n in (8, 4, 2, 1)
            for m in (128, 64, 32, 16, 8, 4, 2)
            for h in (128, 256, 512, 1024, 2048, 4096)
        }
        assert document <= cells
        assert (8, 8192, 128) in cells
    assert {c.dtype for c in overhead.cases("cuda")} == {"float32", "bfloat16"}
    assert {"wall", "device"} == set(overhead.cases("cuda")[0].metrics)
    forward = [c for c in overhead.cases("cuda") if not c.needs_grad]
    assert len(forward) == 560
    assert overhead.cases("cuda")[:560] == forward


def test_cells_with_gradients_are_of_every_depth_and_width() -> None:
    for device in ("cuda", "cpu"):
        trained = [c for c in overhead.cases(device) if c.direction == "forward+backward"]
        assert {(c.dim("L"), c.dim("H")) for c in trained} == {
            (n, h) for n in overhead.LAYERS for h in overhead.WIDTHS
        }
        assert {c.dim("M") for c in trained} == set(overhead.TRAINED)
    assert any(c.needs_grad for c in overhead.cases("cpu", quick=True))


def test_cells_too_large_for_a_cpu_are_there_and_say_so() -> None:
    cells = overhead.cases("cpu")
    left = {(c.dim("L"), c.dim("M"), c.dim("H")) for c in cells if c.left_out and not c.needs_grad}
    assert len([c for c in cells if not c.needs_grad]) == 280
    assert len(left) == 18
    assert (8, 8192, 4096) in left
    assert not any(c.left_out for c in overhead.cases("cuda"))
    (case,) = [c for c in cells if c.left_out and c.name.startswith("relu M8192 L8 H4096")][:1]
    assert "floating-point operations" in case.left_out
    assert all(p.why_not(case) == case.left_out for p in peers(case))


def test_each_mode_of_the_compiler_takes_part_where_it_is_said_to() -> None:
    def batches(device: str, name: str, quick: bool = False) -> set[int]:
        return {
            c.dim("M")
            for c in overhead.cases(device, quick)
            for p in peers(c)
            if p.name == name and p.why_not(c) is None
        }

    modes = {"compile": set(overhead.BATCHES), "compile_max_autotune": {64, 2048}}
    for name, expected in modes.items():
        assert {c.dim("M") for c in overhead.cases("cuda") if name not in c.without} == expected
    assert {name for c in overhead.cases("cuda") for name in c.without} == {"compile_max_autotune"}
    assert batches("cpu", "compile") <= {64}
    assert batches("cpu", "compile_max_autotune") <= {64}
    assert not batches("cpu", "compile", quick=True)


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("layers", [1, 3])
def test_every_contender_is_measured_or_says_why_not(layers: int, direction: str) -> None:
    case = dataclasses.replace(tiny(layers), direction=direction)
    rows = run_case(case, SETTINGS)
    found = {r["contender"]: r for r in rows}
    assert set(found) == {p.name for p in peers(case)}
    for name in ("eager", "hand_loop", "fastlinear", "fastlinear[layerwise]"):
        assert found[name]["skipped"] is None, found[name]["skipped"]
        assert found[name]["valid"]
        assert found[name]["median_us"] > 0
    for row in rows:
        assert not (row["skipped"] or "").startswith("failed"), (row["contender"], row["skipped"])
        assert row["skipped"] or row["valid"], (row["contender"], row["verdicts"])
    pieces = {"forward"} if direction == "forward" else {"forward", "backward"}
    assert pieces <= set(found["fastlinear"]["chosen"])
    if direction != "forward":
        assert "grad.x" in {v["name"] for v in found["hand_loop"]["verdicts"]}
        assert found["onednn"]["skipped"]
    assert found["eager"]["input_sets"] == 1


def test_the_problem_is_the_chain_the_contenders_get() -> None:
    case = tiny(3, 4, 16)
    work = make_work(case, torch.device("cpu"))
    p = problem_of(case)
    assert widths_of(p) == (16,) * 4
    assert not p.needs_grad
    assert problem_of(dataclasses.replace(case, direction="forward+backward")).needs_grad
    assert [tuple(w.shape) for w in work.stacks[0].weights] == [(16, 16)] * 3
    assert tuple(work.stacks[0].x.shape) == (4, 16)


def test_a_wrong_chain_is_found_and_a_growth_of_errors_is_allowed_to_its_contender_alone() -> None:
    def off(factor: float, growth: float, name: str) -> Peer:
        def build(work: Any) -> Any:
            return work.unit(lambda s: plain(s) * (1 + factor))

        return Peer(name, build, error_growth=lambda _: growth)

    case = tiny(4, 32, 64)
    eager = next(p for p in peers(case) if p.name == "eager")
    rows = run_case(case, SETTINGS, [eager])
    slack = 3 * rows[0]["torch_error"]
    contenders = [eager, off(slack, 1, "plain"), off(slack, 3, "fast"), off(30 * slack, 3, "wrong")]
    found = {r["contender"]: r for r in run_case(case, SETTINGS, contenders)}
    assert not found["plain"]["valid"]
    assert found["fast"]["valid"]
    assert not found["wrong"]["valid"]


def test_heat_maps_hold_the_ratios_and_skip_what_was_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eager = next(p for p in peers(tiny()) if p.name == "eager")
    (row,) = run_case(tiny(), SETTINGS, [eager])
    skipped = row | {"contender": "compile", "median_us": None, "skipped": "left out"}
    rows = [_copy(row, "eager", 10.0), _copy(row, "fastlinear[layerwise]", 4.0), skipped]
    rows += [_copy(row, "eager", 8.0, 32), _copy(row, "hand_loop", 16.0, 32)]
    (heat,) = heats(rows)
    assert heat.widths == (16, 32)
    assert heat.speeds == {
        "hand_loop": {(2, 4, 32): 0.5},
        "fastlinear[layerwise]": {(2, 4, 16): 2.5},
    }
    print_heat(rows)
    text = capsys.readouterr().out
    assert "overhead removed" in text
    assert "fastlinear[layerwise]" in text
    assert "2.50" in text
    assert "0.50" in text
    pytest.importorskip("matplotlib")
    assert heatmap(rows, tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in plot(rows, tmp_path / "b.svg").read_text()
    with pytest.raises(InputError, match="overhead"):
        heatmap([skipped], tmp_path / "c.png")


def test_cells_and_contenders_are_selectable(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [tiny(n, m) for n in (1, 2) for m in (2, 4)]
    monkeypatch.setitem(EXPERIMENTS, "overhead", lambda device, quick: cases)
    seen: list[Case] = []

    def instead(case: Case, settings: Settings) -> list[Any]:
        seen.append(case)
        assert settings.only == {"eager", "compile_max_autotune"}
        return []

    monkeypatch.setattr(sys.modules["benchmarks.harness.run"], "run_case", instead)
    names = ["eager", "compile_max_autotune"]
    run("overhead", where=["L=2", "M=2"], peers=names)
    assert [(c.dim("L"), c.dim("M")) for c in seen] == [(2, 2)]
    assert not seen[0].light  # asked for by name, the slow ones take part
    assert seen[0].without == ()
    for wrong, message in (
        ({"where": ["L"]}, "NAME=VALUE"),
        ({"where": ["L=16"]}, "values of L that cases have: 1, 2;"),
        ({"where": ["M=2,8"]}, "values of M that cases have: 2, 4; received '8'"),
        ({"where": ["Q=1"]}, "where to name one of"),
        ({"where": ["L=2"], "dtypes": ["float64"]}, "at least one of the 4 cases"),
        ({"peers": ["nobody"]}, "peers in"),
    ):
        with pytest.raises(InputError, match=message):
            run("overhead", **wrong)  # type: ignore[arg-type]


def test_tables_of_each_direction_and_cells_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eager = next(p for p in peers(tiny()) if p.name == "eager")
    (row,) = run_case(tiny(), SETTINGS, [eager])
    (left,) = run_module._run_case(dataclasses.replace(tiny(4), left_out="too large"), SETTINGS)
    assert (left["contender"], left["skipped"], left["median_us"]) == ("all", "too large", None)
    both = [_copy(row, "eager", 10.0), _copy(row, "fastlinear", 4.0)]
    trained = [r | {"direction": "forward+backward", "median_us": 6.0} for r in both]
    forward, backward = heats([*both, *trained, left])
    assert forward.left_out == {(4, 4, 16): "too large"}
    assert forward.rows == ((4, 4), (2, 4))
    assert backward.title.endswith(", forward+backward")
    assert not backward.left_out
    assert backward.speeds["fastlinear"] == {(2, 4, 16): 1.0}
    print_heat([*both, left])
    text = capsys.readouterr().out
    assert "skip: too large" in text
    assert text.count("skip") == 2
    pytest.importorskip("matplotlib")
    wide = left | {"case": left["case"] | {"dims": {"L": 2, "M": 4, "H": 32}}}
    assert "skip" in heatmap([*both, wide], tmp_path / "a.svg").read_text()
    assert "skip" not in heatmap(both, tmp_path / "b.svg").read_text()


def test_a_case_left_out_is_one_row_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = [tiny(1), dataclasses.replace(tiny(2), left_out="too large")]
    monkeypatch.setitem(EXPERIMENTS, "overhead", lambda device, quick: cases)
    out = tmp_path / "rows.jsonl"
    for rows in (
        run("overhead", peers=["eager"], rounds=5, out=out),
        run("overhead", peers=["eager"], rounds=5, resume=out),
    ):
        assert [r["skipped"] for r in rows if r["case"]["dims"]["L"] == 2] == ["too large"]
        timed = [r["contender"] for r in rows if r["median_us"] is not None]
        assert timed == ["eager"]


RESULTS = Path(__file__).parents[2]


def test_the_tables_of_what_there_is_to_gain_are_what_the_rows_say() -> None:
    text = (RESULTS / "src/fastlinear/families/mlp/README.md").read_text()
    _, _, rest = text.partition("<!-- headroom:begin -->\n")
    written, _, _ = rest.partition("\n<!-- headroom:end -->")
    rows = read_rows(RESULTS / "results/intel-xeon-processor/overhead.jsonl.gz")
    assert written == markdown(rows)
    cells = headroom(rows)
    assert all(c.batch >= 64 and c.width >= 256 for c in cells)
    (heat,) = heats(rows)
    assert heat.speeds["floor"] == {(c.layers, c.batch, c.width): c.most for c in cells}
    assert next(iter(heat.speeds)) == "floor"
    one = next(c for c in cells if (c.layers, c.batch, c.width) == (8, 64, 1024))
    eager = next(
        r
        for r in rows
        if r["contender"] == "eager" and r["case"]["dims"] == {"M": 64, "L": 8, "H": 1024}
    )
    (rate,) = best_rates(rows).values()
    assert one.most == pytest.approx(rate / eager["roofline"]["flops_per_s"])
    assert one.most > 1 / eager["roofline"]["fraction"]  # its own process measured a slower product
    assert one.reached is not None
    assert one.reached < one.most


def test_there_is_no_such_floor_on_a_gpu_of_small_cells_or_by_memory() -> None:
    place = {"bound": "compute", "fraction": 0.5, "flops_per_s": 1e9}
    row = {
        "experiment": "overhead", "metric": "wall", "direction": "forward", "contender": "eager",
        "case": {"device": "cpu", "dtype": "float32", "dims": {"L": 2, "M": 64, "H": 256}},
        "roofline": place, "median_us": 10.0, "env": {"device": {"name": "a CPU"}},
    }  # fmt: skip
    (cell,) = headroom([row])
    assert (cell.most, cell.reached) == (2.0, None)
    (cell,) = headroom([row, row | {"contender": "fastlinear", "median_us": 8.0}])
    assert cell.reached == 1.25
    assert "2.00 (1.25)" in markdown([row, row | {"contender": "fastlinear", "median_us": 8.0}])
    case = row["case"]
    for other in (
        row | {"case": case | {"device": "cuda"}},
        row | {"case": case | {"dims": {"L": 2, "M": 32, "H": 256}}},
        row | {"case": case | {"dims": {"L": 2, "M": 64, "H": 128}}},
        row | {"roofline": place | {"bound": "memory"}},
        row | {"median_us": None},
    ):
        with pytest.raises(InputError, match="rows of eager on a CPU"):
            headroom([other])


def test_one_best_rate_holds_for_all_cells_of_a_machine() -> None:
    """Of ceilings and of what contenders reach the largest: processes measure different ones."""

    def row(contender: str, rate: float, fraction: float, **case: Any) -> Any:
        place = {"bound": "compute", "fraction": fraction, "flops_per_s": rate}
        dims = {"L": 2, "M": 64, "H": 256} | case.pop("dims", {})
        return {
            "experiment": "overhead", "metric": "wall", "direction": "forward",
            "contender": contender, "roofline": place, "median_us": 1e12 / rate,
            "case": {"device": "cpu", "dtype": "float32", "dims": dims} | case,
            "env": {"device": {"name": "a CPU"}},
        }  # fmt: skip

    slow = row("eager", 50e9, 0.5)
    assert headroom([slow])[0].most == 2.0
    quick = row("eager", 50e9, 0.4, dims={"H": 512})  # a ceiling of 125 GFLOP/s
    assert {h.most for h in headroom([slow, quick])} == {2.5}
    peer = row("onednn", 150e9, 1.5)
    assert {h.most for h in headroom([slow, quick, peer])} == {3.0}
    for name in ("fastlinear[strassen]", "fastlinear_fast"):  # it does not do all that is counted
        assert {h.most for h in headroom([slow, quick, row(name, 150e9, 1.5)])} == {2.5}
    assert headroom([slow, row("eager", 400e9, 0.5, dtype="bfloat16")])[0].most == 2.0
    assert markdown([slow, peer]).startswith("Best rate of a product in these rows: 150 GFLOP/s")


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["headroom"]) == 2
    assert "a file of rows as --rows" in capsys.readouterr().err
    rows = RESULTS / "results/intel-xeon-processor/overhead.jsonl.gz"
    assert main(["headroom", "--rows", str(rows)]) == 0
    assert "| 8, 64 |" in capsys.readouterr().out
