"""The experiment: its contenders, its rows, and the training step."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.experiments import EXPERIMENTS
from benchmarks.experiments.overhead.heat import COLUMNS
from benchmarks.experiments.strassen import __main__ as experiment
from benchmarks.experiments.strassen import cases, chain, contenders
from benchmarks.experiments.strassen.scheme import error_growth
from benchmarks.harness import measure as measure_module
from benchmarks.harness import pick
from benchmarks.harness.case import Case
from benchmarks.harness.kinds import KINDS
from benchmarks.harness.measure import Settings, run_case
from benchmarks.harness.rows import read_rows
from fastlinear.core.compare import relative_error, unit_rounding
from fastlinear.core.cost import Ceilings
from fastlinear.core.errors import InputError
from fastlinear.families.mlp import reference

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(torch.device("cpu"), rounds=5, budget_s=0.2)
OURS = (contenders.NAME, contenders.CONTROL)


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "ceilings_for", lambda *_: Ceilings(1e15, 1e15))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiment in the harness, for one test."""
    monkeypatch.setitem(EXPERIMENTS, "strassen", EXPERIMENTS.get("strassen"))
    monkeypatch.setitem(KINDS, "mlp", KINDS["mlp"])
    monkeypatch.setattr(pick, "PROGRAM", pick.PROGRAM)
    experiment.install()


def tiny(m: int = 5, width: int = 17, **more: Any) -> Case:
    (first, *_) = cases.cases("cpu", quick=True)
    return dataclasses.replace(first, dims=(("M", m), ("L", 3), ("H", width)), **more)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_rows_have_the_keys_of_the_committed_ones(direction: str) -> None:
    rows = run_case(tiny(direction=direction), SETTINGS)
    found = {r["contender"]: r for r in rows}
    assert set(OURS) <= set(found)
    assert found[contenders.NAME]["valid"], found[contenders.NAME]
    assert found[contenders.NAME]["median_us"] > 0
    names = [v["name"] for v in found[contenders.NAME]["verdicts"]]
    if direction == "forward":
        assert found[contenders.CONTROL]["valid"]
        assert names == ["output"]
    else:
        assert "forward direction" in found[contenders.CONTROL]["skipped"]
        assert {"output", "grad.x", "grad.weight.0", "grad.bias.2"} <= set(names)
    committed = next(iter(read_rows(ROOT / "results/nvidia-h200/strassen.jsonl.gz")))
    assert set(committed) <= set(found[contenders.NAME])
    assert found["eager"]["experiment"] == committed["experiment"] == "strassen"


def test_every_column_of_the_document_is_a_contender() -> None:
    names = {p.name for p in contenders.peers(tiny())}
    document = {"eager", "hand_loop", "fastlinear[layerwise]"}
    assert document | set(OURS) <= names
    assert set(OURS) <= set(COLUMNS)


def test_a_chain_may_err_by_its_own_bound_only() -> None:
    peers = {p.name: p for p in contenders.peers(tiny())}
    work: Any = type("W", (), {"case": tiny()})
    assert peers[contenders.NAME].error_growth(work) == error_growth(1)
    assert peers[contenders.NAME].saving(work) == pytest.approx(8 / 7)
    others = [p for name, p in peers.items() if name != contenders.NAME]
    assert {(p.error_growth(work), p.saving(work)) for p in others} == {(1.0, 1.0)}


@pytest.mark.usefixtures("installed")
def test_the_command_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    picked = [*("--quick", "--where", "M=65", "--out", str(out), "--rounds", "5")]
    picked += itertools.chain.from_iterable(("--peer", name) for name in ("eager", *OURS))
    assert experiment.main(picked) == 0, capsys.readouterr().err
    rows = list(read_rows(out))
    assert {r["contender"] for r in rows if r["valid"]} == {"eager", *OURS}
    assert rows[0]["command"].startswith("python -m benchmarks.experiments.strassen strassen ")
    with pytest.raises(InputError, match="cases of overhead"):
        experiment.main(["overhead", "--only", "no such case"])


def test_the_product_does_not_know_it() -> None:
    assert "strassen" not in EXPERIMENTS
    assert not set(OURS) & {p.name for p in KINDS["mlp"].peers(tiny())}
    assert not any(name.startswith("benchmarks") for name in vars(sys.modules["fastlinear"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("acts", [("relu", "none"), ("gelu", "silu"), ("sigmoid", "tanh")])
def test_gradients(dtype: torch.dtype, acts: tuple[str, str]) -> None:
    """Odd sizes, leading dimensions and a layer without a bias, against float64."""
    torch.manual_seed(0)
    widths = (33, 21, 10, 7)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * scale).to(dtype).requires_grad_()

    x = draw(2, 5, widths[0])
    ws = [draw(n, k, scale=k**-0.5) for k, n in itertools.pairwise(widths)]
    bs = [draw(n) if i != 1 else None for i, n in enumerate(widths[1:])]
    inputs = (x, *ws, *(b for b in bs if b is not None))
    dy = torch.randn(2, 5, widths[-1]).to(dtype)
    y = chain.mlp(x, ws, bs, *acts)
    ours = (y, *torch.autograd.grad(y, inputs, dy))
    with torch.no_grad():
        assert torch.equal(chain.mlp(x, ws, bs, *acts), y)
    plain = reference.mlp(x, ws, bs, *acts)
    theirs = (plain, *torch.autograd.grad(plain, inputs, dy))
    wide = [t.detach().double().requires_grad_() for t in inputs]
    given = iter(wide[4:])
    exact_bs = [None if b is None else next(given) for b in bs]
    exact = reference.mlp(wide[0], wide[1:4], exact_bs, *acts)
    true = (exact, *torch.autograd.grad(exact, wide, dy.double()))
    for a, t, e in zip(ours, theirs, true, strict=True):
        limit = error_growth(1) * (relative_error(t, e) + 4 * unit_rounding(dtype))
        assert relative_error(a, e) <= limit


def test_what_has_no_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        chain.mlp(torch.randn(3, 4).double(), [torch.randn(2, 4).double()])
    with pytest.raises(ValueError, match="empty"):
        chain.mlp(torch.randn(0, 4), [torch.randn(2, 4)])
    with pytest.raises(InputError, match=r"weights\[0\]"):
        chain.mlp(torch.randn(3, 4), [torch.randn(2, 5)])
