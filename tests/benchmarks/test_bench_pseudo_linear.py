"""Experiment ``pseudo-linear``: its cases, contenders, table, curve and model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.contenders import diagonal_linear as pseudo_linear
from benchmarks.contenders import diagonal_machine as pseudo_machine
from benchmarks.contenders.diagonal_machine import Machine
from benchmarks.contenders.diagonal_model import Expected, expected
from benchmarks.experiments import pseudo_linear as cases
from benchmarks.experiments.pseudo_linear import table as pseudo_table
from benchmarks.harness.case import Case
from benchmarks.harness.plot import plot
from benchmarks.harness.run import run
from fastlinear.core.timing import Samples

RATE, BANDWIDTH = 1e14, 1e12


def machine(m: int, k: int, new_us: float = 0.0) -> Machine:
    """One whose products all run at one rate."""
    product = 2.0 * m * k * k / RATE * 1e6
    both = {"linear": 10.0, "fastlinear": 5.0}
    products = (product,) * 3
    return Machine(RATE, products, None, 50.0, BANDWIDTH, BANDWIDTH, new_us, 2.0, 3.0, None, both)


def case(direction: str = "forward", activation: str = "none") -> Case:
    (found,) = (
        c
        for c in cases.cases("cpu", quick=True)
        if (c.dim("M"), c.dim("K")) == (64, 128)
        and (c.direction, c.option("activation")) == (direction, activation)
    )
    return found


def test_the_documents_widths_are_there() -> None:
    found = cases.cases("cuda")
    widths = {c.dim("K") for c in found if c.dim("M") == 32768}
    assert {128, 256, 512, 1024, 2048, 4096, 8192, 16384, 24576} == widths
    assert {c.dim("M") for c in found} == {32768, 64, 1}
    assert (1, 16) in {(c.dim("M"), c.dim("K")) for c in found}
    assert {c.direction for c in found} == {"forward", "forward+backward"}
    assert {c.option("activation") for c in found} == {"none", "relu", "gelu", "silu"}
    branches = [c for c in found if c.option("residual") == "yes"]
    assert {c.dtype for c in branches} == {"float32", "bfloat16", "float16"}
    assert all(c.option("bias") == "no" for c in branches)
    assert all(2 * c.dim("M") * c.dim("K") ** 2 <= 7e10 for c in cases.cases("cpu"))


@pytest.mark.parametrize("activation", ["none", "relu", "residual"])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_contenders_compute_the_same(direction: str, activation: str) -> None:
    """All but the full layer, which is the yardstick; it is itself again at every build."""
    one = case(direction, "none" if activation == "residual" else activation)
    if activation == "residual":
        options = (("activation", "none"), ("bias", "no"), ("residual", "yes"))
        one = replace(one, options=options)
    work = pseudo_linear.make_work(one, torch.device("cpu"))
    theirs = work.reference(torch.float32)
    for peer in pseudo_linear.peers(one):
        if "compile" in peer.name or peer.why_not(one) is not None:
            continue
        built = peer.build(work)
        unit = getattr(built, "unit", built)
        with work.mode():
            found = unit(0)
        if peer.name in ("linear", "fastlinear_bare_copy"):
            assert peer.reference is not None
            again = peer.reference(work, torch.float64)
            assert all(torch.equal(a.double(), b) for a, b in zip(found, again, strict=True))
            assert found[0].shape == theirs[0].shape
            continue
        for a, b in zip(found, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return run(
        "pseudo-linear",
        quick=True,
        rounds=5,
        where=("K=128", "direction=forward", "activation=none"),
        skip=("compile",),
    )


def test_rows_carry_what_was_expected(rows: list[dict[str, Any]]) -> None:
    by_name = {r["contender"]: r for r in rows if r["median_us"] is not None}
    assert {"linear", "eager", "torchscript", "fastlinear", "fastlinear_out"} <= set(by_name)
    assert by_name["fastlinear_bare_copy"]["best_peer"] == by_name["fastlinear"]["best_peer"]
    assert all(r["valid"] for r in by_name.values())
    for name in ("linear", "fastlinear"):
        assert float(by_name[name]["chosen"]["expected wall us"]) > 0
    assert "forward" in by_name["fastlinear"]["chosen"]


def test_table_and_curve(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (curve,) = pseudo_table.curves(rows)
    assert curve.title == "float32, batch 64, forward, wall time"
    times = {r["contender"]: r["samples_us"] for r in rows}
    rounds = [a / b for a, b in zip(times["linear"], times["fastlinear"], strict=True)]
    assert curve.rounds[128] == rounds
    assert curve.speedups[128]["fastlinear"] == statistics.median(rounds)
    chosen = {r["contender"]: r["chosen"] for r in rows}
    first, second = (float(chosen[n]["expected wall us"]) for n in ("linear", "fastlinear"))
    assert curve.expected[128] == first / second
    text = pseudo_table.table(rows)
    assert "Speed-up over nn.Linear: float32, batch 64, forward, wall time" in text
    assert f"{curve.speedups[128]['fastlinear']:.2f}" in text
    assert "Expected within 25% of measured" in text
    pytest.importorskip("matplotlib")
    assert "expected" in plot(rows, tmp_path / "curve.svg").read_text()


def test_misses_of_the_model_are_named(rows: list[dict[str, Any]]) -> None:
    measured = next(r for r in rows if r["contender"] == "fastlinear")["median_us"]

    def told(us: float) -> list[dict[str, Any]]:
        """Rows in which Linear took ten times as long, and the model said so many microseconds."""
        found = []
        for r in rows:
            if r["contender"] in ("linear", "fastlinear"):
                ours = r["contender"] == "fastlinear"
                chosen = {"expected wall us": str(1.0 if ours else us), "expected bound": "memory"}
                took = measured * (1 if ours else 10)
                times = {"median_us": took, "samples_us": [0.8 * took, 1.2 * took, took, took]}
                found.append(r | times | {"chosen": chosen})
        return found

    assert pseudo_table.agreement(told(12.0))[:2] == (1, 1)
    near, total, misses = pseudo_table.agreement(told(13.0))
    assert (near, total) == (0, 1)
    assert "width 128: 10.00 measured (10.00 to 10.00), 13.00 expected" in misses[0]
    assert "Linear expected to take" in misses[0]
    assert pseudo_table.repeated(told(12.0)) == (1, 1)


def test_a_machine_that_changes_meanwhile_is_told(rows: list[dict[str, Any]]) -> None:
    """Rounds count in pairs; and where their halves differ, no model agrees with both."""

    def told(ours: list[float]) -> list[dict[str, Any]]:
        chosen = {"expected wall us": "10.0", "expected bound": "memory"}
        times = {"linear": [10.0, 20.0, 10.0, 20.0, 10.0], "fastlinear": ours}
        return [
            r | {"samples_us": t, "median_us": statistics.median(t), "chosen": chosen}
            for name, t in times.items()
            for r in rows
            if r["contender"] == name
        ]

    steady = told([1.0, 2.0, 1.0, 2.0, 1.0])
    (curve,) = pseudo_table.curves(steady)
    assert curve.speedups[128]["fastlinear"] == 10.0
    assert pseudo_table.repeated(steady) == (1, 1)
    assert pseudo_table.repeated(told([1.0, 2.0, 2.0, 4.0, 2.0])) == (0, 1)
    assert "of the other: 0 of 1 (0%)" in pseudo_table.table(told([1.0, 2.0, 2.0, 4.0, 2.0]))


def test_the_model_knows_its_three_regimes() -> None:
    """The host decides for few numbers, memory for narrow layers, arithmetic for wide ones."""

    def of(name: str, m: int, k: int, grad: bool = False) -> Expected:
        return expected(name, m, k, "float32", grad, machine(m, k))

    def speedup(m: int, k: int) -> float:
        return of("linear", m, k).wall_us / of("fastlinear", m, k).wall_us

    assert speedup(1, 16) == 2.0  # 10 us against 5
    assert speedup(1 << 20, 64) == pytest.approx(1.0, abs=0.01)
    ridge = RATE / BANDWIDTH  # operations a byte
    wide = 2 * 8192 / (8 * ridge)  # 2 K operations for 8 bytes of a number
    assert speedup(1 << 20, 8192) == pytest.approx(wide, rel=0.01)
    assert speedup(1 << 20, 16384) == pytest.approx(2 * wide, rel=0.01)
    assert of("linear", 64, 64).bound == "the host"
    assert of("linear", 1 << 20, 64).bound == "memory"
    assert of("linear", 1 << 20, 8192, True).bound == "arithmetic"


def test_a_layer_measured_whole_is_what_a_layer_takes() -> None:
    """On a CPU: no starts, sums and new results on top, and the longer of its reasons named."""
    m, k = 64, 1024

    def whole(us: float, m: int) -> Expected:
        rates = replace(machine(m, k, 9.0), layer_us=us, kernel_us=0.0)
        return expected("linear", m, k, "float32", True, rates)

    found = whole(700.0, m)
    assert (found.device_us, found.wall_us) == (700.0, 710.0)
    assert found.bound == "memory"
    found = whole(1e5, 1 << 20)
    assert (found.device_us, found.bound) == (1e5, "arithmetic")


def test_the_model_counts_what_each_backend_does() -> None:
    """Passes over memory, kernels, new results, and an activation where it is one of its own."""
    m, k = 1 << 20, 64
    one = m * k * 4 / BANDWIDTH * 1e6  # a pass
    row = one / m  # of a parameter

    def us(name: str, act: str, grad: bool, backends: tuple[str, str], new: float = 0.0) -> float:
        rates = machine(m, k, new)
        return expected(name, m, k, "float32", grad, rates, act, backends).device_us

    triton, eager = ("triton", "triton"), ("eager", "eager")
    assert us("fastlinear", "relu", False, triton) == pytest.approx(2 * one + 2 * row + 3)
    assert us("fastlinear", "relu", True, triton) == pytest.approx(5 * one + 6 * row + 3)
    assert us("fastlinear", "none", False, eager) == pytest.approx(4 * one + 2 * row + 3)
    assert us("fastlinear", "relu", True, eager) == pytest.approx(15 * one + 6 * row + 2 * 50 + 3)
    assert us("fastlinear", "relu", False, ("addcmul", "")) == pytest.approx(4 * one + 2 * row + 3)
    assert us("fastlinear", "none", False, triton, 9.0) == pytest.approx(2 * one + 2 * row + 3 + 9)
    single = expected("fastlinear", 1, k, "float32", False, machine(1, k)).device_us
    assert single == pytest.approx(4 * row + 3)  # of one row the parameters are half of all
    plain, acts = us("linear", "none", False, ("", "")), us("linear", "relu", False, ("", ""))
    assert acts == pytest.approx(plain + 2 * one + 2)


def test_expected_times_come_from_this_machine() -> None:
    rates = pseudo_machine.measured(
        *("cpu", "float32", 256, 512, "none", True, ("cpp", "cpp"), 1), "a case"
    )
    assert rates.flops_per_s > 1e8
    assert rates.bytes_per_s is None or rates.bytes_per_s > 1e7
    assert expected("fastlinear", 256, 512, "float32", True, rates).host > 0


def test_a_pass_that_takes_what_a_bare_call_takes_has_no_rate() -> None:
    assert pseudo_machine._rate(1e3, 1.05, 1.0) is None
    assert pseudo_machine._rate(1e3, 0.9, 1.0) is None
    assert pseudo_machine._rate(1e3, 2.0, 1.0) == pytest.approx(1e9)


def test_starts_are_measured_on_sets_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a case's calls are, which find the caches filled by others."""
    calls: list[int] = []

    def small_call(*_: object) -> Callable[[], None]:
        number = len(made)
        made.append(number)
        return lambda: calls.append(number)

    def interleave(arms: dict[str, Callable[[], object]], **_: object) -> dict[str, Samples]:
        for _ in range(4):
            for call in arms.values():
                call()
        return {name: Samples(name, (2.0, 1.0), "device", 1, "graph") for name in arms}

    made: list[int] = []
    monkeypatch.setattr(pseudo_machine, "_small_call", small_call)
    monkeypatch.setattr(pseudo_machine, "interleave", interleave)
    monkeypatch.setattr(pseudo_machine, "device_facts", lambda _: SimpleNamespace(l2_bytes=64))
    found = pseudo_machine._call_us.__wrapped__("cpu", "float32", "none", False, "cpp", (1, 16), 3)
    assert found == 2.0
    assert made == [0, 1, 2]
    assert sorted(calls) == [0, 1, 1, 2]


def test_scaled_branches_do_not_stand_in_for_layers(rows: list[dict[str, Any]]) -> None:
    """They have a layer's sizes, and nothing of Linear's beside them."""
    branches = []
    for r in rows:
        if r["contender"] == "fastlinear":
            options = {"activation": "none", "bias": "no", "residual": "yes"}
            case = r["case"] | {"options": options}
            branches.append(r | {"median_us": 1e-3, "case": case, "chosen": {}})
    assert branches
    assert pseudo_table.curves([*rows, *branches]) == pseudo_table.curves(rows)
    assert pseudo_table.agreement([*rows, *branches]) == pseudo_table.agreement(rows)


def test_panels_keep_to_their_places(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """No title reaches into another panel or past the edge, whatever kinds of call there are."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kept: list[Figure] = []
    made = []
    for direction in ("forward", "forward+backward"):
        for activation in ("none", "leaky_relu"):
            for m in (64, 32768):
                for r in rows:
                    dims = {**r["case"]["dims"], "M": m}
                    options = {**r["case"]["options"], "activation": activation}
                    case = r["case"] | {"dims": dims, "options": options}
                    made.append(r | {"case": case, "direction": direction})
    before = Figure.savefig

    def savefig(figure: Figure, *given: Any, **how: Any) -> None:
        kept.append(figure)
        before(figure, *given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        plot(made, tmp_path / "curves.png")
    (figure,) = kept
    renderer = FigureCanvasAgg(figure).get_renderer()
    axes = [ax for ax in figure.axes if ax.axison]
    assert len(axes) == 8
    assert len(figure.legends) == 1
    titles = [ax._left_title.get_window_extent(renderer) for ax in axes]
    for i, title in enumerate(titles):
        assert title.width > 0
        assert title.x1 <= figure.bbox.x1
        others = [ax.get_tightbbox(renderer) for ax in axes if ax is not axes[i]]
        assert not any(title.overlaps(other) for other in others)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"fastlinear", "eager", "expected of fastlinear", "within 25% of that"} <= set(labels)
    assert len(labels) == len(set(labels))
