"""Running cases end to end on a CPU, with tiny sizes and contenders of known behaviour."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.contenders.linear_act import Peer, peers
from benchmarks.experiments import EXPERIMENTS, linear
from benchmarks.harness import ceilings as ceilings_module
from benchmarks.harness import measure as measure_module
from benchmarks.harness.case import Case
from benchmarks.harness.measure import Settings, run_case
from benchmarks.harness.plot import plot, speeds
from benchmarks.harness.rows import behind, read_rows
from benchmarks.harness.run import run
from benchmarks.harness.work import Work, make_work, plain
from fastlinear.core.cost import Ceilings
from fastlinear.core.errors import InputError, UnsupportedError

# Slow to prepare; they have their own test.
COMPILED = ("compile", "compile_max_autotune", "compile_reduce_overhead")
SETTINGS = Settings(torch.device("cpu"), rounds=5, budget_s=0.5, skip=frozenset(COMPILED))


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings far above anything a test machine reaches, without measuring them."""
    high = Ceilings(flops_per_s=1e15, bytes_per_s=1e15)
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: high)


def tiny(direction: str, layers: int = 1, activation: str = "gelu_tanh") -> Case:
    sizes = (("M", 8), ("K", 16), ("N", 16), ("L", layers))
    options = (("activation", activation), ("bias", "yes"))
    return Case(
        "linear", "linear_act", sizes, "float32", "cpu", direction, ("wall",), options, light=True
    )


def by_contender(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in rows}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("direction", ["forward", "forward+backward", "step"])
def test_every_contender_is_measured_or_has_a_reason(direction: str, layers: int) -> None:
    rows = run_case(tiny(direction, layers, "relu"), SETTINGS)
    found = by_contender(rows)
    assert set(found) == {p.name for p in peers(tiny(direction))}
    for row in rows:
        if row["skipped"] is None:
            assert row["valid"], row["verdicts"]
            assert row["median_us"] > 0
            assert len(row["samples_us"]) == 5
            assert row["ci95_us"][0] <= row["median_us"] <= row["ci95_us"][1]
            assert row["ratio_to_best"] > 0
        else:
            assert row["median_us"] is None
            assert not row["valid"]
            assert not row["skipped"].startswith("failed"), row["skipped"]
    names = [v["name"] for v in found["fastlinear"]["verdicts"]]
    assert names[0] == "output"
    assert ("grad.x" in names) == (direction == "forward+backward")
    assert (f"grad.weight.{layers - 1}" in names) == (direction != "forward")
    assert (f"grad.bias.{layers - 1}" in names) == (direction != "forward")
    assert any("forward" in piece for piece in found["fastlinear"]["chosen"])
    assert found["eager"]["env"]["threads"] == torch.get_num_threads()
    assert found["eager"]["shapes"]["x"] == [8, 16]


def _fake(name: str, delay_s: float = 0.0, factor: float = 1.0) -> Peer:
    def build(work: Work) -> Any:
        def forward(stack: Any) -> torch.Tensor:
            time.sleep(delay_s)
            return plain(stack) * factor

        return work.unit(forward)

    return Peer(name, build)


def test_fake_contenders_of_known_speed_are_ranked_and_wrong_ones_get_no_time() -> None:
    contenders = [  # far longer than a busy machine keeps a process that has slept
        _fake("eager", 0.02),
        _fake("slow", 0.06),
        _fake("fastlinear", 0.04),
        _fake("wrong", 0.0, 1.001),
    ]
    rows = run_case(tiny("forward"), SETTINGS, contenders)
    found = by_contender(rows)
    assert found["wrong"]["error"] == pytest.approx(1e-3, rel=0.01)
    assert found["wrong"]["torch_error"] < 1e-6
    assert found["wrong"]["median_us"] is None
    assert found["wrong"]["skipped"] is None
    assert found["fastlinear"]["best_peer"] == "eager"
    assert 1.2 < found["fastlinear"]["ratio_to_best"] < 2.4
    assert found["eager"]["median_us"] >= 20_000
    assert found["slow"]["median_us"] >= 60_000
    # the loss is published
    assert [r["contender"] for r in behind(rows)] == ["fastlinear"]


def test_a_wrong_gradient_is_found() -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            return w.clone()

        @staticmethod
        def backward(ctx: Any, dw: torch.Tensor) -> torch.Tensor:
            return dw * 0.5

    def build(work: Work) -> Any:
        def forward(stack: Any) -> torch.Tensor:
            return plain(
                dataclasses.replace(stack, weights=tuple(map(Halved.apply, stack.weights)))
            )

        return work.unit(forward)

    for direction in ("forward+backward", "step"):
        rows = run_case(tiny(direction), SETTINGS, [_fake("eager"), Peer("halved", build)])
        bad = by_contender(rows)["halved"]
        assert not bad["valid"]
        assert [v["name"] for v in bad["verdicts"] if not v["passed"]] == ["grad.weight.0"]


def test_a_contender_that_breaks_is_recorded_and_the_others_go_on() -> None:
    def build(work: Work) -> Any:
        raise RuntimeError("no kernel\nsecond line")

    rows = run_case(tiny("forward"), SETTINGS, [_fake("eager"), Peer("broken", build)])
    found = by_contender(rows)
    assert found["broken"]["skipped"] == "failed: RuntimeError: no kernel"
    assert found["eager"]["median_us"] > 0


def test_above_the_roofline_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    low = Ceilings(flops_per_s=1.0, bytes_per_s=1.0)
    again = []

    def measured_again(*arguments: Any) -> Ceilings:
        again.append(arguments)
        return low

    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: low)
    monkeypatch.setattr(measure_module, "measured_again", measured_again)
    (row,) = run_case(tiny("forward"), SETTINGS, [_fake("eager")])
    assert len(again) == 1
    assert row["roofline"]["fraction"] > 1.0
    assert "measured ceiling" in row["roofline_error"]


def test_a_ceiling_measured_too_low_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = Ceilings(1.0, 5.0), Ceilings(1e15, 2.0)
    monkeypatch.setattr(ceilings_module, "_measured", lambda *_, fresh: high if fresh else low)
    monkeypatch.setattr(ceilings_module, "_again", {})
    best = ceilings_module.measured_again(low, torch.device("cpu"), "float32", 1.0)
    assert best == Ceilings(1e15, 5.0)


def test_least_cost_counts_each_outer_tensor_once() -> None:
    m, k, n = 8, 16, 16
    outer = m * k + m * n + n * k + n
    forward = make_work(tiny("forward"), torch.device("cpu")).cost()
    assert (forward.flops, forward.bytes) == (2 * m * k * n, 4 * outer)
    both = make_work(tiny("forward+backward"), torch.device("cpu")).cost()
    assert (both.flops, both.bytes) == (6 * m * k * n, 8 * outer)
    step = make_work(tiny("step"), torch.device("cpu")).cost()
    assert (step.flops, step.bytes) == (4 * m * k * n, 8 * outer - 4 * m * k)


def test_run_writes_rows_draws_them_and_restores_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = [tiny("forward"), tiny("forward", 2, "relu")]
    monkeypatch.setitem(EXPERIMENTS, "linear", lambda device, quick: cases)
    before = torch.get_num_threads()
    out = tmp_path / "new" / "rows.jsonl"
    seen: list[tuple[str, int, int]] = []
    rows = run(
        "linear",
        quick=True,
        out=out,
        threads=1,
        skip=COMPILED,
        progress=lambda *a: seen.append(a),
    )
    assert torch.get_num_threads() == before
    assert rows[0]["env"]["threads"] == 1
    assert read_rows(out) == rows
    assert "--threads 1" in rows[0]["command"]
    assert seen[-1] == ("done", 2, 2)
    compiled = by_contender(rows)["compile"]
    assert compiled["skipped"] == "left out by the caller"

    pytest.importorskip("matplotlib")
    png, svg = plot(rows, tmp_path / "a.png"), plot(rows, tmp_path / "b.svg")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = svg.read_text()
    assert "<svg" in text
    assert "fastlinear" in text or "path" in text
    with pytest.raises(InputError, match=r"\.png or \.svg"):
        plot(rows, tmp_path / "c.pdf")
    with pytest.raises(InputError, match="no such row"):
        plot([r for r in rows if r["skipped"]], tmp_path / "d.png")


def test_plot_shows_losing_contenders() -> None:
    rows = run_case(tiny("forward"), SETTINGS, [_fake("eager"), _fake("slow", 0.003)])
    (panel,) = speeds(rows).values()
    assert panel[tiny("forward").problem]["slow"] < 0.5


def test_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = run_case(tiny("forward"), SETTINGS, [_fake("eager")])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"fastlinear\[plots\]"):
        plot(rows, tmp_path / "a.png")


def test_a_spent_budget_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "linear", lambda device, quick: [tiny("forward")])
    (row,) = run("linear", budget_s=-1.0)
    assert row["contender"] == "all"
    assert "budget" in row["skipped"]


def test_a_case_that_breaks_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(tiny("forward"), options=(("activation", "no_such"),))
    monkeypatch.setitem(EXPERIMENTS, "linear", lambda device, quick: [wrong])
    (row,) = run("linear")
    assert row["contender"] == "all"
    assert row["skipped"].startswith("failed: InputError")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experiment": "nothing"}, "an experiment in"),
        ({"experiment": "linear", "dtypes": ["int8"]}, "dtypes in"),
        ({"experiment": "linear", "only": "no such case"}, "at least one of the"),
        ({"experiment": "linear", "quick": True, "dtypes": ["float16"]}, "at least one of the 6"),
        (
            {"experiment": "linear", "quick": True, "where": ["Z=3"]},
            "where to name one of M, K, N, L, activation, bias, direction",
        ),
        (
            {"experiment": "linear", "quick": True, "where": ["M=1,77"]},
            "values of M that cases have: 1, 64, 128; received '77'",
        ),
        (
            {"experiment": "linear", "quick": True, "only": "zzz"},
            "one of the 6 cases of linear --quick; received only='zzz'",
        ),
        (
            {"experiment": "linear", "quick": True, "skip": ["eager", "nope"]},
            "skip in compile, .*; received nope",
        ),
        (
            {"experiment": "linear", "quick": True, "peers": ["eager"], "skip": ["eager"]},
            "peers and skip that leave a contender",
        ),
    ],
)
def test_bad_arguments_say_what_was_expected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(**arguments)


def test_an_unwritable_file_is_found_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="writable"):
        run("linear", quick=True, out=tmp_path / "file" / "rows.jsonl")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_is_an_unsupported_environment() -> None:
    with pytest.raises(UnsupportedError, match="CUDA device"):
        run("linear", device="cuda")


def test_the_experiment_holds_the_hard_shapes_and_the_healthy_baseline() -> None:
    cuda, cpu = linear.cases("cuda"), linear.cases("cpu")
    for dtype in ("bfloat16", "float16", "float32"):
        names = {c.problem for c in cuda if c.dtype == dtype}
        assert f"gelu_tanh M1 K4096 N4096 {dtype}" in names
        assert f"none M8192 K768 N3072 {dtype}" in names
        assert f"gelu_tanh M8192 K4096 N4096 {dtype}" in names
    chains = {(c.dim("K"), c.dim("M"), c.direction) for c in cpu if c.dim("L") == 8}
    for width in (64, 256, 1024):
        for batch in (1, 64, 1024):
            assert (width, batch, "forward") in chains
    assert {(1024, 64, "step"), (1024, 1024, "step")} <= chains
    few = {(c.dim("M"), c.dtype) for c in cpu if c.dtype != "float32"}
    assert few == {(m, dtype) for m in (1, 8, 16, 32) for dtype in ("bfloat16", "float16")}
    headline = next(c for c in cuda if c.direction == "forward+backward" and not c.light)
    assert {"first_call", "peak_memory"} <= set(headline.metrics)


def test_cpu_ceilings_know_the_caches() -> None:
    rate = ceilings_module._warm_bandwidth(1 << 16, "cpu", torch.get_num_threads())
    assert 1e8 < rate < 1e13


@pytest.mark.slow
def test_torch_compile_takes_part_where_a_compiler_is() -> None:
    import shutil

    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    settings = dataclasses.replace(SETTINGS, skip=frozenset())
    compiled = [p for p in peers(tiny("forward")) if p.name in ("eager", "compile")]
    row = by_contender(run_case(tiny("forward"), settings, compiled))["compile"]
    assert row["skipped"] is None
    assert row["valid"]
    assert row["median_us"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_on_cuda_all_metrics_and_rotating_sets(direction: str) -> None:
    sizes = (("M", 512), ("K", 1024), ("N", 1024), ("L", 1))
    options = (("activation", "gelu_tanh"), ("bias", "yes"))
    metrics = ("device", "wall", "first_call", "peak_memory")
    case = Case(
        "linear", "linear_act", sizes, "bfloat16", "cuda", direction, metrics, options, light=True
    )
    device = torch.device("cuda")
    settings = dataclasses.replace(SETTINGS, device=device)
    rows = run_case(case, settings)
    failed = [r["skipped"] for r in rows if (r["skipped"] or "").startswith("failed")]
    assert not failed
    measured = {(r["contender"], r["metric"]): r for r in rows if r["valid"]}
    assert measured["eager", "device"]["how"] == "graph"
    assert measured["cuda_graph", "wall"]["median_us"] > 0
    assert ("cuda_graph", "device") not in measured
    assert measured["fastlinear", "peak_memory"]["peak_bytes"] > 0
    assert measured["fastlinear", "first_call"]["median_us"] > 0
    assert measured["eager", "wall"]["input_sets"] > 1
    assert measured["eager", "wall"]["env"]["driver"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_what_is_wrong_only_in_a_graph_gets_no_time() -> None:
    case = dataclasses.replace(tiny("forward"), device="cuda", metrics=("wall", "device"))

    def build(work: Work) -> Any:
        def forward(stack: Any) -> torch.Tensor:
            y = plain(stack)
            return y * 1.1 if torch.cuda.is_current_stream_capturing() else y

        return work.unit(forward)

    settings = dataclasses.replace(SETTINGS, device=torch.device("cuda"))
    rows = run_case(case, settings, [Peer("fastlinear", build), _fake("eager")])
    assert {r["contender"] for r in rows if r["median_us"]} == {"eager"}
    (wrong,) = (r for r in rows if r["contender"] == "fastlinear")
    assert {v["name"]: v["passed"] for v in wrong["verdicts"]} == {
        "output": True,
        "output in a CUDA graph": False,
    }
