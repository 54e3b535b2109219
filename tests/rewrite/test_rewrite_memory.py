"""Trials that run out of memory, or take more than their share, end; nothing else does."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fastlinear.core import memory
from fastlinear.core.errors import InputError
from fastlinear.core.settings import Config
from fastlinear.rewrite import apply_, optimize_, registry
from fastlinear.rewrite.evaluate import measure, site, try_compiled
from fastlinear.rewrite.survey import profile
from fastlinear.rewrite.verify import model as verify
from tests.core.graph_tape import TapeRecorder
from tests.rewrite.rewrite_models import Clock, mlp, run, snapshot

optimizing = sys.modules["fastlinear.rewrite.optimize"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
ONE = 10 << 20  # bytes that each recording pretends to hold
CPU = torch.device("cpu")


class Held:
    """Recordings alive, as the bytes of a device of 1000 MiB."""

    def __init__(self) -> None:
        self.alive, self.most = 0, 0

    def made(self, recording: Any) -> Any:
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(recording, self.gone)
        return recording

    def gone(self) -> None:
        self.alive -= 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, tape: None) -> Held:
    found, record = Held(), TapeRecorder.record
    monkeypatch.setattr(TapeRecorder, "record", lambda *a, **k: found.made(record(*a, **k)))
    monkeypatch.setattr(memory, "free_bytes", lambda _: (1000 << 20) - found.alive * ONE)
    monkeypatch.setattr(memory, "held_bytes", lambda _: found.alive * ONE)
    return found


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_graphs_beyond_their_share_end_the_trial(mode: str, held: Held, clock: Clock) -> None:
    clock({"onednn": 50.0, "pieces": 50.0, "after": 50.0})
    model = mlp().train(mode == "train")
    before = snapshot(model)
    config = Config(
        mode=mode, families=(), graphs=True, draws=1, optimizer_steps=1, trial_memory=0.015
    )
    result = optimize_(model, X, config=config)
    (graph,) = [s for s in result.sites if s.rule == "graphed"]
    assert (graph.status, graph.code) == ("rejected", "out_of_memory")
    assert "15 MiB that Config.trial_memory allows" in graph.reason
    assert held.most * ONE > 15 << 20
    gc.collect()
    assert held.alive == 0
    result.revert()
    assert snapshot(model) == before
    # With enough of it the same graph is kept, and holds what it recorded when first called.
    result = optimize_(model, X, config=replace(config, trial_memory=1.0))
    (graph,) = [s for s in result.sites if s.rule == "graphed"]
    assert graph.status == "kept"
    assert held.alive == 0
    plan = result.plan.to_json()
    result.revert()
    assert apply_(model, plan).kept


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def raised_from_it(*_: Any, **__: Any) -> Any:
    try:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 4 TiB")
    except RuntimeError as error:
        raise InputError("optimize_", "a model to run", str(error), "Look.") from error


PLACES = {
    "tuning": (measure.tuning, "tune"),
    "a site verified": (site, "failure"),
    "a site timed": (site, "pair"),
    "chains": (optimizing, "choose"),
    "verifying": (verify, "run_once"),
    "the oracle": (optimizing, "keep_accurate"),
    "the whole model timed": (measure, "model_pair"),
    "graphs": (optimizing, "choose_graph"),
    "compiling": (try_compiled, "_compiled"),
    "more rows": (optimizing, "tune_rows"),
}


@pytest.mark.parametrize(
    ("place", "raising"),
    [*((place, out_of_memory) for place in PLACES), ("the whole model timed", raised_from_it)],
)
def test_memory_that_runs_out_in_a_trial(
    place: str, raising: Any, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp().eval()
    plain, before = copy.deepcopy(model), snapshot(model)
    monkeypatch.setattr(*PLACES[place], raising)
    compiling = place.startswith("compil")
    backends = {} if place == "tuning" else {"linear_act": "onednn"}
    config = Config(draws=1, compile=compiling, rows=(64,), backends=backends, time_budget_s=3.0)
    result = optimize_(model, X, config=config)
    told = [*result.notes, *(s.reason for s in result.sites)]
    assert any("memory" in text for text in told), told
    assert {s.status for s in result.sites} <= {"kept", "rejected", "undecided", "nothing_to_do"}
    assert {s.fqn for s in result.sites} >= {"0", "2", "4"}
    torch.testing.assert_close(run(model, X), run(plain, X))
    result.revert()
    assert snapshot(model) == before


def test_memory_that_runs_out_while_more_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (rule,) = (rule for rule in registry.RULES if rule.name == "experts")
    monkeypatch.setattr(registry, "RULES", (replace(rule, findings=out_of_memory),))
    result = optimize_(mlp().eval(), X, config=Config(draws=1, families=(rule.family,)))
    assert any("looking for more ended early, out of memory" in n for n in result.notes)
    assert profile(mlp().eval(), X).sites


def test_what_says_that_memory_ran_out() -> None:
    for raising in (out_of_memory, raised_from_it):
        with pytest.raises((RuntimeError, InputError)) as caught:
            raising()
        assert memory.ran_out(caught.value)
    assert memory.ran_out(MemoryError())
    assert not memory.ran_out(RuntimeError("CUDA error"))


def test_limits_end_where_they_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [0]
    monkeypatch.setattr(memory, "free_bytes", lambda _: 100)
    monkeypatch.setattr(memory, "held_bytes", lambda _: taken[0])
    memory.check()
    with memory.limited(CPU, 0.5):
        taken[0] = 50
        memory.check()
        taken[0] = 51
        with pytest.raises(torch.OutOfMemoryError):
            memory.check()
    memory.check()
    with memory.limited(CPU, 0.5):  # what was held before does not count
        memory.check()


@pytest.mark.parametrize("share", [0, -0.1, 1.1, True, "half", float("nan")])
def test_shares_that_are_none(share: Any) -> None:
    with pytest.raises(InputError, match="trial_memory to be a share above 0 and at most 1"):
        Config(trial_memory=share)


class Routed(nn.Module):
    """Experts whose numbers of rows depend on the values."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        blocks = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )
        self.experts = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            y = y.index_add(0, rows, expert(x[rows]))
        return y


@pytest.mark.gpu
def test_a_mixture_of_experts_in_training_stays_within_its_share() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = nn.Sequential(*(Routed(32, 256) for _ in range(4))).cuda()
    x = torch.randn(2048, 256, device="cuda")
    before, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    config = Config(mode="train", graphs=True, time_budget_s=60.0, trial_memory=0.02)
    result = optimize_(model, x, config=config)
    peak = torch.cuda.max_memory_reserved() - before
    assert peak < 0.10 * free, (peak >> 20, free >> 20)  # the steps themselves count, too
    result.revert()
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved() - before
    assert left < 0.02 * free, left >> 20
    assert result.summary()
