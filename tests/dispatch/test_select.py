"""Selection: the order of sources, the text of explanations, the shipped tables."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

import fastlinear as fl
from fastlinear.core import deprecated
from fastlinear.core.cost import Cost
from fastlinear.core.device import DeviceFacts, device_facts
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.core.timing import Samples
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch import cache, tables
from fastlinear.dispatch.backend import Backend, Family, families, family, register_family
from fastlinear.dispatch.explain import Explanation
from fastlinear.dispatch.select import select
from fastlinear.dispatch.tune import tune, winner
from fastlinear.families.linear.problem import problem

select_module = importlib.import_module("fastlinear.dispatch.select")
HERE = "fastlinear.families.linear.reference:forward"


def never_imported(name: str) -> str:
    return f"fastlinear.no_such_module_{name}:run"


@pytest.fixture
def toy() -> Iterator[Family]:
    """A family with three backends; ``fast`` and ``slow`` serve, ``picky`` only K = 8."""
    picky = "wants K=8"
    made = Family(
        name="toy",
        pieces=("forward",),
        backends=(
            Backend("toy", "forward", "slow", HERE, lambda _: None),
            Backend("toy", "forward", "fast", HERE, lambda _: None, ("families/linear/cpu",)),
            Backend(
                "toy",
                "forward",
                "picky",
                never_imported("picky"),
                lambda p: None if p.dim("K") == 8 else picky,
            ),
        ),
        prefer=lambda _: ("picky", "slow", "fast"),
        make_inputs=lambda p, device, seed: (),
        reference=lambda p, inputs: None,
        cost=lambda _: Cost(1.0, 1.0),
    )
    register_family(made)
    yield made
    registry._FAMILIES.pop("toy")


def call(m: int = 16, k: int = 4) -> Problem:
    return Problem("toy", "forward", (("M", m), ("K", k)), "float32", "cpu")


def ship(monkeypatch: pytest.MonkeyPatch, folder: Path, *rows: tuple[Problem, str]) -> None:
    """Make these the shipped rows of this machine's CPU."""
    data = {
        "torch": "2.x",
        "rows": [
            {"problem": p.to_json(), "best": best, "times_us": {"slow": 4.0, "fast": 3.0}}
            for p, best in rows
        ],
    }
    (folder / f"{device_facts('cpu').slug}.json").write_text(json.dumps(data))
    monkeypatch.setattr(tables, "_FOLDER", folder)
    tables.table.cache_clear()


@pytest.fixture(autouse=True)
def fresh_tables() -> Iterator[None]:
    yield
    tables.table.cache_clear()


def test_order_forced_tuned_table_default(
    toy: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (select(call()).backend.name, select(call()).source) == ("slow", "default")
    ship(monkeypatch, tmp_path, (call(), "fast"))
    assert (select(call()).backend.name, select(call()).source) == ("fast", "table")
    cache.store(call(), toy.candidates("forward")[:2], "slow", {"slow": 1.0, "fast": 2.0})
    chosen = select(call())
    assert (chosen.backend.name, chosen.source) == ("slow", "tuned")
    assert dict(chosen.passed_over)["fast"] == "measured 2.00x the time of slow"
    chosen = select(call(), "fast")
    assert (chosen.backend.name, chosen.source) == ("fast", "forced")


def test_a_doubt_keeps_the_choice_without_it_where_that_is_a_rival(
    toy: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    able, times = toy.candidates("forward")[:2], {"slow": 2.0, "fast": 1.0}
    cache.store(call(), able, "fast", times, "it was busy", ())
    assert (select(call()).backend.name, select(call()).source) == ("fast", "tuned")
    cache.store(call(), able, "fast", times, "it was busy", ("slow",))
    kept = select(call())
    assert (kept.backend.name, kept.source) == ("slow", "default")
    assert "tuning took fast in its place and is in doubt: it was busy" in kept.reason
    ship(monkeypatch, tmp_path, (call(), "fast"))
    assert (select(call()).backend.name, select(call()).source) == ("fast", "tuned")
    cache.store(call(), able, "slow", times, "it was busy")  # any may be: nothing says which
    kept = select(call())
    assert (kept.backend.name, kept.source) == ("fast", "table")
    assert kept.reason.endswith("tune again when it is quiet")


def test_the_other_regime_stands_in(toy: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a CUDA graph and outside are measured apart; either stands in for the other."""
    outside = Problem("toy", "forward", (("M", 16), ("K", 4)), "float32", "cuda")
    inside = outside.other_regime()
    assert inside is not None
    assert inside.captured
    assert inside.other_regime() == outside
    assert call().other_regime() is None
    able = toy.candidates("forward")[:2]
    entries: dict[str, object] = {}
    where = Path("no GPU needed")
    monkeypatch.setattr(cache, "cache_path", lambda _: where)
    monkeypatch.setattr(cache, "_loaded", {where: entries})
    monkeypatch.setattr(select_module, "shipped", lambda *_: None)
    entry = {
        "torch": torch.__version__,
        "hashes": {b.name: b.source_hash() for b in able},
        "times_us": {"slow": 1.0, "fast": 2.0},
    }
    entries[outside.key()] = entry | {"best": "slow"}
    assert select(inside).backend.name == "slow"
    assert select(inside).reason.endswith("measured outside CUDA graphs")
    entries[inside.key()] = entry | {"best": "fast"}
    assert select(inside).backend.name == "fast"
    assert select(outside).backend.name == "slow"


def test_default_passes_over_what_cannot_serve(toy: Family) -> None:
    assert select(call(k=8)).backend.name == "picky"
    assert select(call(k=9)).backend.name == "slow"


@pytest.mark.parametrize("forced", [None, "slow", "fast"])
def test_explanation_covers_every_backend(toy: Family, forced: str | None) -> None:
    chosen = select(call(), forced)
    told = {chosen.backend.name, *(name for name, _ in chosen.passed_over)}
    assert told == {b.name for b in toy.backends}
    assert chosen.reason
    assert all(why for _, why in chosen.passed_over)
    assert dict(chosen.passed_over)["picky"] == "wants K=8"
    text = str(Explanation((chosen,)))
    assert all(name in text for name in told)
    assert json.loads(json.dumps(Explanation((chosen,)).to_json()))[0]["source"] == chosen.source


def test_forced_backend_that_cannot_serve(toy: Family) -> None:
    with pytest.raises(UnsupportedError) as caught:
        select(call(), "picky")
    error = caught.value
    assert error.function == "toy"
    assert "'picky'" in error.expected
    assert "wants K=8" in error.received
    assert error.remedy
    assert error.exit_code == 5


def test_forced_backend_that_does_not_exist(toy: Family) -> None:
    with pytest.raises(InputError, match=r"\['fast', 'picky', 'slow'\].*'quick'"):
        select(call(), "quick")


def test_nothing_able_says_why_for_each(toy: Family) -> None:
    bare = Family(
        "bare", toy.pieces, toy.backends[2:], toy.prefer, toy.make_inputs, toy.reference, toy.cost
    )
    register_family(bare)
    try:
        with pytest.raises(UnsupportedError, match="picky: wants K=8"):
            select(Problem("bare", "forward", (("M", 1), ("K", 4)), "float32", "cpu"))
    finally:
        registry._FAMILIES.pop("bare")


@pytest.mark.parametrize(
    ("name", "backend", "instead"),
    [
        ("mlp", "graph", "fastlinear.graphed"),
        ("linear_act", "onednn_packed", "'onednn'"),
        ("linear_act", "mkl_packed", "'eager'"),
        ("gated_mlp", "onednn_packed", "'onednn'"),
    ],
)
def test_a_removed_backend_has_a_remedy(name: str, backend: str, instead: str) -> None:
    assert backend not in {b.name for b in family(name).candidates("forward")}
    message = rf"'{backend}'.*It was removed\. .*{instead}.*Leave"
    with pytest.raises(InputError, match=message):
        registry.check_backend(backend, name, "here")
    x, w = torch.randn(2, 8), torch.randn(8, 8)
    call = {
        "mlp": lambda: fl.mlp(x, [w], activation="relu", backend=backend),
        "linear_act": lambda: fl.linear_act(x, w, activation="relu", backend=backend),
        "gated_mlp": lambda: fl.gated_mlp(x, w, w, w, backend=backend),
    }
    with pytest.raises(InputError, match=message):
        call[name]()


def test_unknown_family() -> None:
    with pytest.raises(InputError, match=r"a family in .*linear_act.*received 'nope'"):
        family("nope")


def test_selection_imports_no_backend(toy: Family) -> None:
    select(call(k=8))
    with pytest.raises(ModuleNotFoundError):
        toy.backends[2].load()


def test_nearest_row_wins(toy: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship(
        monkeypatch,
        tmp_path,
        (call(m=16), "slow"),
        (call(m=28), "fast"),
        (call(m=24, k=8), "slow"),
    )
    able = toy.candidates("forward")[:2]

    def row(m: int, k: int = 4) -> tuple[int, int] | None:
        found = tables.shipped(call(m, k), able)
        return None if found is None else (found.problem.dim("M"), found.problem.dim("K"))

    assert row(16) == (16, 4)
    assert row(20) == (16, 4)
    assert row(24) == (28, 4)
    assert row(56) == (28, 4)  # exactly a factor of two away
    assert row(57) is None
    assert row(8) == (16, 4)
    assert row(7) is None
    assert row(24, k=6) == (24, 8)  # log2(8/6) is nearer than log2(6/4)
    assert row(24, k=17) is None
    assert row(0) is None


def test_row_is_used_only_if_everything_else_is_equal(
    toy: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(monkeypatch, tmp_path, (call(), "fast"))
    able = toy.candidates("forward")[:2]
    p = call()
    assert tables.shipped(p, able) is not None
    others = (
        Problem(p.family, p.piece, p.dims, "float16", p.device),
        Problem(p.family, p.piece, p.dims, p.dtype, p.device, (("activation", "relu"),)),
        Problem(p.family, p.piece, p.dims, p.dtype, p.device, (), True),
        Problem(p.family, p.piece, p.dims, p.dtype, p.device, (), False, "high"),
        Problem(p.family, p.piece, (*p.dims, ("N", 1)), p.dtype, p.device),
    )
    assert all(tables.shipped(o, able) is None for o in others)


def test_akin_rows_stand_in_where_none_has_all_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def p(activation: str, bias: bool, m: int = 64) -> Problem:
        return problem(
            "forward", m, 32, 32, dtype="float32", device="cpu", activation=activation, bias=bias
        )

    def looked_up(asked: Problem) -> tables.Row | None:
        return tables.shipped(asked, family("linear_act").candidates("forward"))

    rows = [(p("gelu", True), "slow"), (p("none", True), "slow"), (p("gelu", True, 32), "fast")]
    ship(monkeypatch, tmp_path, *rows)
    data = json.loads((tmp_path / f"{device_facts('cpu').slug}.json").read_text())
    for row, (_, best) in zip(data["rows"], rows, strict=True):
        row["times_us"] = {"eager": 4.0, "onednn": 3.0}
        row["best"] = {"slow": "eager", "fast": "onednn"}[best]
    (tmp_path / f"{device_facts('cpu').slug}.json").write_text(json.dumps(data))
    tables.table.cache_clear()
    row = looked_up(p("gelu", True))
    assert row is not None
    assert (row.best, row.differs) == ("eager", "")
    row = looked_up(p("silu", False, 32))
    assert row is not None
    assert (row.best, row.differs) == ("onednn", "activation=gelu, bias=yes")
    assert "activation=gelu bias=yes" in row.story().replace(", ", " ")
    row = looked_up(p("none", False))
    assert row is not None
    assert row.differs == "bias=yes"
    assert looked_up(p("none", True, 1024)) is None


def test_a_small_lead_does_not_carry_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def p(m: int) -> Problem:
        return problem("forward", m, 32, 32, dtype="float32", device="cpu", activation="gelu")

    path = tmp_path / f"{device_facts('cpu').slug}.json"
    monkeypatch.setattr(tables, "_FOLDER", tmp_path)
    for theirs, far in ((1.05, "eager"), (1.5, "onednn")):
        times = {"eager": theirs, "onednn": 1.0}
        row = {"problem": p(64).to_json(), "best": "onednn", "times_us": times}
        path.write_text(json.dumps({"torch": "2.x", "rows": [row]}))
        for m, expected in ((64, "onednn"), (66, "onednn"), (128, far), (32, far)):
            tables.table.cache_clear()
            found = tables.shipped(p(m), family("linear_act").candidates("forward"))
            assert found is not None
            assert found.best == expected, (theirs, m)


def test_fastest_able_backend_stands_in_for_a_winner_that_cannot_serve(
    toy: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(monkeypatch, tmp_path, (call(), "fast"))
    row = tables.shipped(call(), toy.candidates("forward")[:1])
    assert row is not None
    assert row.best == toy.candidates("forward")[0].name
    assert list(row.times_us) == [row.best]
    assert tables.shipped(call(), ()) is None


@pytest.mark.parametrize(("units", "served"), [(132, True), (114, False)])
def test_a_gpu_of_the_same_processor_takes_its_table(
    units: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100 has the H200's multiprocessors, and other memory."""
    path = Path(tables.__file__).parent / "nvidia-h200.json"
    measured = json.loads(path.read_text(encoding="utf-8"))["environment"]["device"]
    facts = DeviceFacts(**measured | {"capability": tuple(measured["capability"])})
    key = facts.capability, facts.units
    assert {key: facts.slug} == tables._SAME_PROCESSOR
    other = replace(facts, name="NVIDIA H100 80GB HBM3", slug="nvidia-h100-80gb-hbm3", units=units)
    monkeypatch.setattr(tables, "device_facts", lambda _: other)
    asked = problem(
        *("forward", 8192, 768, 3072),
        dtype="bfloat16",
        device="cuda",
        activation="gelu_tanh",
        bias=True,
        precision="n/a",
    )
    able = family("linear_act").candidates("forward")
    row = tables.shipped(asked, able)
    assert (row is not None) is served
    if row is not None:
        assert "shipped measurement of an nvidia-h200 at M=8192" in row.story()
        monkeypatch.setattr(tables, "device_facts", lambda _: facts)
        own = tables.shipped(asked, able)
        assert own is not None
        assert (own.best, own.elsewhere) == (row.best, "")


def test_rows_of_its_own_come_before_those_of_the_same_processor(
    toy: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near, a GPU's own row serves; nearer, the other's."""
    able = toy.candidates("forward")
    ship(monkeypatch, tmp_path, (call(m=64), "fast"), (call(m=128), "fast"))
    mine = device_facts("cpu")
    akin = replace(mine, kind="cuda", slug="akin", capability=(9, 0), units=132)
    own = replace(akin, slug="own")
    for slug, sizes, best in (("akin", (64, 128), "fast"), ("own", (64,), "slow")):
        text = (tmp_path / f"{mine.slug}.json").read_text()
        data = json.loads(text)
        data["rows"] = [
            r | {"best": best} for r in data["rows"] if r["problem"]["dims"]["M"] in sizes
        ]
        (tmp_path / f"{slug}.json").write_text(json.dumps(data))
    monkeypatch.setattr(tables, "_SAME_PROCESSOR", {((9, 0), 132): "akin"})
    monkeypatch.setattr(tables, "device_facts", lambda _: own)
    found = [tables.shipped(call(m=m), able) for m in (64, 128)]
    assert [(r.best, r.elsewhere) for r in found if r] == [("slow", ""), ("fast", "akin")]
    monkeypatch.setattr(tables, "device_facts", lambda _: akin)
    found = [tables.shipped(call(m=m), able) for m in (64, 128)]
    assert [(r.best, r.elsewhere) for r in found if r] == [("fast", ""), ("fast", "")]


def test_shipped_tables_are_valid() -> None:
    """Whatever is shipped can be read, and names backends that exist."""
    for path in Path(tables.__file__).parent.glob("*.json"):
        found = [tables.table(path.stem, name) for name in families()]
        assert any(found)
        for row in chain.from_iterable(r for grouped in found for r in grouped.values()):
            known = {b.name for b in family(row.problem.family).candidates(row.problem.piece)}
            assert row.best in known
            assert set(row.times_us) <= known
            assert all(us > 0 for us in row.times_us.values())


def test_a_table_of_several_families_needs_one() -> None:
    """A process that calls one family loads no other, though the table has rows of all."""
    code = (
        "import sys\n"
        "from fastlinear.dispatch.tables import table\n"
        "assert table('nvidia-h200', 'linear_act')\n"
        "assert 'fastlinear.families.mlp.backends' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def samples(name: str, us: float, spread: float = 0.0) -> Samples:
    values = tuple(us + spread * ((i % 5) - 2) for i in range(15))
    return Samples(name, values, "wall", 1, "clock")


def test_winner_must_beat_eager_beyond_noise() -> None:
    assert winner({"eager": samples("eager", 10.0), "a": samples("a", 5.0)})[0] == "a"
    assert winner({"eager": samples("eager", 10.0), "a": samples("a", 10.5)})[0] == "eager"
    noisy = {"eager": samples("eager", 10.0, 2.0), "a": samples("a", 9.99)}
    assert winner(noisy)[0] == "eager"
    three = {"eager": samples("eager", 9.0), "a": samples("a", 5.0), "b": samples("b", 4.0)}
    best, speedups = winner(three)
    assert best == "b"
    assert speedups["b"].median == pytest.approx(9 / 4)
    assert winner({"a": samples("a", 2.0), "b": samples("b", 1.0)}) == ("b", {})


def test_tune_verifies_times_and_remembers() -> None:
    from fastlinear.families.linear.problem import problem

    p = problem(
        "forward",
        32,
        64,
        48,
        dtype="float32",
        device="cpu",
        activation="relu",
        precision=torch.get_float32_matmul_precision(),
    )
    result = tune(p, rounds=5, budget_s=0.1)
    assert result.stored
    assert result.best in result.samples
    assert "eager" in result.samples
    assert set(result.samples) | set(result.rejected) == {
        b.name for b in family("linear_act").candidates("forward")
    }
    assert "CUDA" in result.rejected["cublaslt"]
    cache.forget()
    chosen = select(p)
    assert (chosen.backend.name, chosen.source) == (result.best, "tuned")
    x, w, b = torch.randn(32, 64), torch.randn(48, 64), torch.randn(48)
    assert fl.explain(x, w, b, activation="relu").choices[0].source == "tuned"


def test_tune_without_save_leaves_no_trace() -> None:
    from fastlinear.families.linear.problem import problem

    p = problem("grad_weight", 8, 8, 8, dtype="float64", device="cpu")
    result = tune(p, rounds=5, save=False)
    assert (result.best, result.stored) == ("eager", False)
    assert cache.entries("cpu") == {}


def test_shipped_rows_of_a_gpu_compare_backends() -> None:
    """A row of eager alone is no measurement of a choice: it would hide every backend of ours."""
    path = Path(tables.__file__).parent / "nvidia-h200.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    alone = [
        row["problem"]
        for row in rows
        if len(row["times_us"]) < 2 and row["problem"]["piece"] != "step"
    ]
    assert alone == []
    assert len(rows) > 6000


@pytest.mark.parametrize(
    ("before", "now"), [("strips", "packed_groups"), ("resident", "weight_stationary")]
)
def test_a_renamed_backend_is_found_by_its_former_name(
    before: str, now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deprecated, "_warned", set())
    grouped = family("grouped_linear")
    assert grouped.current(now) == now
    with pytest.warns(
        DeprecationWarning, match=f"backend='{before}' is now called backend='{now}'"
    ):
        registry.check_backend(before, "grouped_linear", "a plan")
    assert grouped.current(before) == now  # it warns once
    x, weight = torch.randn(4, 6), torch.randn(2, 5, 3)
    with pytest.raises(UnsupportedError, match=f"'{now}'.*CUDA devices only"):
        fl.grouped_linear(x, weight, backend=before)


def test_whoever_uses_a_former_name_sees_the_warning() -> None:
    """Python shows a DeprecationWarning only where ``__main__`` is told of it."""
    code = """
import torch, fastlinear as fl
try:
    fl.grouped_linear(torch.randn(4, 6), torch.randn(2, 5, 3), backend="strips")
except fl.UnsupportedError:
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "DeprecationWarning: backend='strips' is now called" in done.stderr
