"""Selection: the order of sources, the text of explanations."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fastlinear as fl
from fastlinear.core import deprecated
from fastlinear.core.cost import Cost
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.core.timing import Samples
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import Backend, Family, family, register_family
from fastlinear.dispatch.explain import Explanation
from fastlinear.dispatch.prices import Price, Prices, name_of
from fastlinear.dispatch.select import select
from fastlinear.dispatch.tune import tune, winner
from fastlinear.dispatch.work import Work, host
from fastlinear.dispatch.work import call as launch
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
            Backend(
                "toy",
                "forward",
                "picky",
                never_imported("picky"),
                lambda p: None if p.dim("K") == 8 else picky,
            ),
            Backend("toy", "forward", "slow", HERE, lambda _: None),
            Backend("toy", "forward", "fast", HERE, lambda _: None, ("families/linear/cpu",)),
        ),
        make_inputs=lambda p, device, seed: (),
        reference=lambda p, inputs: None,
        cost=lambda _: Cost(1.0, 1.0),
        cpu_work=lambda _, backend: (host(backend),),
    )
    register_family(made)
    yield made
    registry._FAMILIES.pop("toy")


def call(m: int = 16, k: int = 4) -> Problem:
    return Problem("toy", "forward", (("M", m), ("K", k)), "float32", "cpu")


def price(monkeypatch: pytest.MonkeyPatch, **us: float) -> None:
    """Make a call of these backends cost so much here."""
    known = {name_of(host(name).kind, "float32"): Price(math.log(us[name])) for name in us}
    monkeypatch.setattr(select_module, "prices", lambda _: Prices("here", known))


def test_order_forced_tuned_predicted_default(toy: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (select(call()).backend.name, select(call()).source) == ("slow", "default")
    price(monkeypatch, slow=4.0, fast=3.0)
    assert (select(call()).backend.name, select(call()).source) == ("fast", "predicted")
    assert select(call()).reason == "least predicted: 3 us = 3 fast host"
    cache.store(call(), toy.candidates("forward")[1:], "slow", {"slow": 1.0, "fast": 2.0})
    chosen = select(call())
    assert (chosen.backend.name, chosen.source) == ("slow", "tuned")
    assert dict(chosen.passed_over)["fast"] == "measured 2.00x the time of slow"
    chosen = select(call(), "fast")
    assert (chosen.backend.name, chosen.source) == ("fast", "forced")


def test_a_doubt_keeps_the_choice_without_it_where_that_is_a_rival(
    toy: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    able, times = toy.candidates("forward")[1:], {"slow": 2.0, "fast": 1.0}
    cache.store(call(), able, "fast", times, "it was busy", ())
    assert (select(call()).backend.name, select(call()).source) == ("fast", "tuned")
    cache.store(call(), able, "fast", times, "it was busy", ("slow",))
    kept = select(call())
    assert (kept.backend.name, kept.source) == ("slow", "default")
    assert "tuning took fast in its place and is in doubt: it was busy" in kept.reason
    price(monkeypatch, slow=4.0, fast=3.0)
    assert (select(call()).backend.name, select(call()).source) == ("fast", "tuned")
    cache.store(call(), able, "slow", times, "it was busy")  # any may be: nothing says which
    kept = select(call())
    assert (kept.backend.name, kept.source) == ("fast", "predicted")
    assert kept.reason.endswith("tune again when it is quiet")


def test_what_is_avoided_is_taken_only_where_nothing_else_can_serve(
    toy: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, or by what was measured, it is taken all the same."""
    coarse = "its numbers are less exact"
    picky, slow, fast = toy.backends
    price(monkeypatch, slow=4.0, fast=3.0)
    register_family(
        replace(toy, backends=(picky, slow, replace(fast, why_avoided=lambda _: coarse)))
    )
    chosen = select(call())
    assert (chosen.backend.name, dict(chosen.passed_over)["fast"]) == ("slow", coarse)
    assert select(call(), "fast").backend.name == "fast"
    register_family(replace(toy, backends=(picky, fast)))
    assert select(call()).backend.name == "fast"


def test_the_other_regime_stands_in(toy: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a CUDA graph and outside are measured apart; either stands in for the other."""
    outside = Problem("toy", "forward", (("M", 16), ("K", 4)), "float32", "cuda")
    inside = outside.other_regime()
    assert inside is not None
    assert inside.captured
    assert inside.other_regime() == outside
    assert call().other_regime() is None
    able = toy.candidates("forward")[1:]
    entries: dict[str, object] = {}
    where = Path("no GPU needed")
    monkeypatch.setattr(cache, "cache_path", lambda _: where)
    monkeypatch.setattr(cache, "_loaded", {where: entries})
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


def test_a_piece_by_the_call_pays_for_the_longer_of_host_and_device(
    toy: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where autograd keeps the host busy, what spares it is taken; in a graph what is fastest."""
    quick, lean = ("slow", "fast")  # as the family names its backends

    def work(p: Problem, backend: str) -> tuple[Work, ...]:
        return (launch(backend), host(backend))

    pieces = ("forward", "backward", "step")
    backends = tuple(replace(b, piece=q) for q in pieces for b in toy.backends if b.name != "picky")
    register_family(replace(toy, pieces=pieces, backends=backends, gpu_work=work))
    us = {f"half {quick} call": 30.0, f"half {lean} call": 40.0, "any toy node host": 150.0}
    us |= {f"any {quick} host": 31.0, f"any {lean} host": 6.0}
    known = {kind: Price(math.log(t)) for kind, t in us.items()}
    monkeypatch.setattr(select_module, "prices", lambda _: Prices("here", known))
    monkeypatch.setattr(select_module, "tuned", lambda *_: None)
    p = replace(call(), dtype="bfloat16", device="cuda", needs_grad=True)
    for piece in ("forward", "backward"):
        by_call = select(p.with_piece(piece))
        assert by_call.backend.name == lean
        assert "toy node host" in by_call.reason
        assert select(replace(p.with_piece(piece), captured=True)).backend.name == quick
    assert select(replace(p, needs_grad=False)).backend.name == quick
    long = dict(known) | {f"half {lean} call": Price(math.log(400.0))}
    monkeypatch.setattr(select_module, "prices", lambda _: Prices("here", long))
    assert select(p).backend.name == quick


@pytest.mark.parametrize("name", ["linear_act", "mlp", "gated_mlp", "grouped_linear"])
def test_pieces_share_the_time_for_autograd(name: str) -> None:
    pieces = [q for q in family(name).pieces if q != "step"]
    dims = (("M", 8), ("K", 8), ("N", 8))
    p = Problem(name, "forward", dims, "float32", "cuda", needs_grad=True)
    shares = {q: select_module._share_of_node(p.with_piece(q))[0].units for q in pieces}
    parts = {q for q in pieces if q not in ("forward", "backward")}
    assert shares["forward"] + shares["backward"] == pytest.approx(1.0)
    if parts:
        assert sum(shares[q] for q in parts) == pytest.approx(shares["backward"])


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
    bare = Family("bare", toy.pieces, toy.backends[:1], toy.make_inputs, toy.reference, toy.cost)
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
        toy.backends[0].load()


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


def test_tune_verifies_times_and_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fastlinear.dispatch.tune.doubt_of", lambda *_: ""
    )  # on a busy machine, too
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

    p = problem("grad_weight", 8, 8, 8, dtype="float64", device="cpu")
    result = tune(p, rounds=5, save=False)
    assert (result.best, result.stored) == ("eager", False)
    assert cache.entries("cpu") == {}


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
