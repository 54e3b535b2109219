"""What the time budget covers, on a clock of the tests' own: what it does not reach is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fastlinear as fl
from fastlinear.core.errors import NotYetError
from fastlinear.core.problem import Problem
from fastlinear.core.progress import silent
from fastlinear.fastpath import lookup
from fastlinear.fastpath.build import waited
from fastlinear.native import cpp_build
from fastlinear.rewrite.evaluate import measure, site
from fastlinear.rewrite.evaluate.not_measured import note_time
from fastlinear.rewrite.optimize import problems
from tests.rewrite.rewrite_models import Clock

CPU = torch.device("cpu")


class Hands:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def moving(self, function: Any, seconds: float) -> Any:
        """The function, which takes that long."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return function(*args, **kwargs)

        return call


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    found = Hands()
    monkeypatch.setattr(measure, "time", found)
    return found


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8), nn.GELU())


def test_problems_that_tuning_does_not_come_to_are_counted(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[Problem] = []
    known = problems(layers().eval(), torch.ones(4, 16))
    asked = len({q for p in known for q in measure.deciding(p)})
    assert asked > 1
    slow = hands.moving(lambda p, **_: tuned.append(p) or SimpleNamespace(), 20.0)
    monkeypatch.setattr(measure.tuning, "tune", slow)  # 20 s: the first run compiles
    with measure.Budget(3.0) as budget:
        measure.tune_all(known, CPU, budget=budget, seed=0, progress=silent)
    assert len(tuned) == 1
    assert budget.untuned == asked - 1
    assert budget.left_s == 0


@pytest.mark.usefixtures("fast")
def test_layers_that_it_does_not_reach_stay_and_are_told(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers().eval()
    monkeypatch.setattr(site, "failure", hands.moving(site.failure, 2.0))
    forced = {"linear_act": "onednn"}
    config = fl.Config(time_budget_s=3, families=("linear_act",), tune=False, backends=forced)
    result = fl.optimize_(model, torch.ones(4, 16), config=config)
    first, second = result.sites
    assert first.status == "kept"
    assert (second.status, second.code) == ("undecided", "no_time")
    assert "the time budget of 3 s was spent before it" in second.reason
    assert "forward" not in vars(model[2])
    note = next(n for n in result.notes if "did not reach everything" in n)
    assert "not measured: 2;" in note


@pytest.mark.usefixtures("fast")
def test_chains_that_it_does_not_reach_are_neither_measured_nor_waited_for(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "failure", hands.moving(site.failure, 2.0))
    monkeypatch.setattr(lookup, "wait", lambda *_: pytest.fail("waited"))
    config = fl.Config(time_budget_s=3, tune=False, backends={"linear_act": "onednn"})
    chain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    result = fl.optimize_(chain.eval(), torch.ones(4, 16), config=config)
    left = [n for n in result.notes if n.startswith("chain") and "left alone" in n]
    assert left
    assert all("not measured: the time budget of 3 s was spent" in n for n in left)


def test_chains_whose_calls_wait_for_the_compiler_are_left_when_there_is_no_time(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    clock({"after": 50.0})
    monkeypatch.setattr(lookup, "_build", never_there())
    chain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    config = fl.Config(time_budget_s=0.2, tune=False, backends={"mlp": "layerwise"})
    notes = fl.optimize_(chain.eval(), torch.ones(4, 16), config=config).notes
    assert any("not measured: the compiled lookup was not there yet" in n for n in notes)


@pytest.mark.parametrize(
    ("after", "outcome"), [(50.0, ("kept", "faster")), (200.0, ("undecided", "no_time"))]
)
def test_a_layer_is_slower_only_by_its_compiled_lookup(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, after: float, outcome: tuple[str, str]
) -> None:
    """A gain without it is one with it; else the layer is timed again once it is there."""
    clock({"after": after})
    monkeypatch.setattr(lookup, "_build", never_there())
    monkeypatch.setattr(lookup, "is_compiling", lambda: True)
    forced = {"linear_act": "onednn"}
    config = fl.Config(time_budget_s=2, tune=False, backends=forced, families=("linear_act",))
    result = fl.optimize_(nn.Sequential(nn.Linear(16, 32)).eval(), torch.ones(4, 16), config=config)
    (site,) = result.sites
    assert (site.status, site.code) == outcome, site.reason
    if site.status == "undecided":
        assert "the compiled lookup was not there yet" in site.reason


@pytest.mark.usefixtures("fast")
def test_builds_are_waited_for_as_long_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s: list[float] = []
    monkeypatch.setattr(lookup, "settle", waited_s.append)
    forced = {"linear_act": "onednn"}
    for seconds in (3.0, 600.0):
        config = fl.Config(
            time_budget_s=seconds, backends=forced, tune=False, families=("linear_act",)
        )
        fl.optimize_(layers().eval(), torch.ones(4, 16), config=config)
    short, long = waited_s
    assert short <= 3.0
    assert long == lookup.PATIENCE_S


def never_there() -> Any:
    found = lookup._Build()
    found.started = True  # by a thread that does not end
    return found


def noted(budget: measure.Budget, compiled_s: float) -> list[str]:
    work: Any = SimpleNamespace(
        budget=budget, outcomes={}, notes=[], compiled_s=compiled_s, config=fl.Config()
    )
    note_time(work)
    return list(work.notes)


def test_the_first_compilation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_build, "_seconds", [50.0])  # of before
    before = cpp_build.compiled_s()
    assert not noted(measure.Budget(3.0), before)
    cpp_build._seconds.append(4.0)
    (note,) = noted(measure.Budget(3.0), before)
    assert note == "compiling C++ for this processor took 4 s; later runs find it done"


def test_problems_whose_callers_wait_for_the_compiler_are_left_when_there_is_no_time(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    clock({})
    monkeypatch.setattr(lookup, "_build", never_there())
    known = problems(layers().eval(), torch.ones(4, 16))
    with measure.Budget(0.2) as budget:
        done = measure.tune_all(known, CPU, budget=budget, seed=0, progress=silent)
    assert not done
    assert budget.compiling
    assert budget.untuned == len({q for p in known for q in measure.deciding(p)})
    (note,) = noted(budget, cpp_build.compiled_s())
    assert "(the compiled lookup was not there yet)" in note


def test_patience_is_for_all_waits_together() -> None:
    never = never_there()
    with lookup.patience(0.02):
        assert not waited(never, 0.001)  # the caller's own limit is the shorter one
        with pytest.raises(NotYetError):
            waited(never, None)
        with pytest.raises(NotYetError):
            waited(never, 60.0)
    assert not waited(never, 0.0)
    never.done.set()
    with lookup.patience(0.0):
        assert not waited(never, 60.0)  # it cannot be built: nothing to wait for
