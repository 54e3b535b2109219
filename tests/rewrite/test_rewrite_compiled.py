"""The model through torch.compile: offered, tried when asked for, kept if faster, undone.

Dynamo traces as it does for users; its graphs then run eagerly, which takes no C++ compiler.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastlinear.core.errors import PlanError
from fastlinear.core.settings import Config
from fastlinear.profile.between import CODE
from fastlinear.profile.records import Finding
from fastlinear.rewrite import apply_, optimize_
from fastlinear.rewrite.evaluate import compiled, measure
from fastlinear.rewrite.swap.compiled_forward import (
    REDUCE_OVERHEAD,
    CompiledForward,
)
from fastlinear.rewrite.swap.modules import SwapSet
from tests.rewrite.compiled_regions import COMPILE, X, region
from tests.rewrite.rewrite_models import Clock, Functional, mlp, run, snapshot

optimizing = sys.modules["fastlinear.rewrite.optimize"]
finishing = sys.modules["fastlinear.rewrite.finish"]
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("graphs_run_eagerly"),
]


@pytest.mark.parametrize(
    ("make", "mode", "families"),
    [(mlp, "inference", None), (Functional, "inference", ()), (Functional, "train", ())],
)
def test_optimize_save_apply_revert(make: Any, mode: str, families: Any, clock: Clock) -> None:
    clock({"onednn": 50.0, "pieces": 50.0, "after": 50.0})
    model = make().train(mode == "train")
    plain, before = copy.deepcopy(model), snapshot(model)
    result = optimize_(model, X, config=replace(COMPILE, mode=mode, families=families))
    found = region(result)
    assert (found.status, found.code) == ("kept", "faster"), found
    assert "2.00x" in found.reason
    assert "in one graph" in found.reason
    assert all(v.passed for v in result.verdicts)
    linears = {s.status for s in result.sites if s.rule != "compiled"}
    assert ("kept" in linears) == (families is None)
    assert isinstance(model.__dict__["forward"], CompiledForward)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.eval()
    plain.eval()
    for rows in (8, 8, 3):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(run(model, x), run(plain, x))
    model.train(mode == "train")
    plan = json.loads(json.dumps(result.plan.to_json()))
    result.revert()
    assert snapshot(model) == before
    again = apply_(model, plan)
    assert (region(again).status, region(again).code) == ("kept", "in_plan")
    assert again.plan.rewrites == result.plan.rewrites
    assert (again.plan.compiled, again.plan.compile_mode) == (("",), "default")
    again.revert()
    assert snapshot(model) == before


def test_the_table_names_it(clock: Clock) -> None:
    clock({"after": 50.0})
    result = optimize_(mlp().eval(), X, config=COMPILE)
    text = result.table(width=160)
    assert "and the model compiled: " in text
    assert "every process compiles anew" in text


def test_the_note_says_how_many_shapes_are_compiled(clock: Clock) -> None:
    """The kept model is right at every shape, and compiled at as many as the note says."""
    clock({"after": 50.0})
    model = mlp().eval()
    plain = copy.deepcopy(model)
    with torch._dynamo.config.patch(recompile_limit=3):
        counts = torch._dynamo.utils.counters["stats"]
        before = counts["unique_graphs"]
        result = optimize_(model, X, config=replace(COMPILE, families=()))
        (note,) = [n for n in result.notes if "recompile_limit" in n]
        assert "for 3 shapes at most" in note
        for rows in (8, 3, 4, 5, 6, 8):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(run(model, x), run(plain, x))
        assert counts["unique_graphs"] - before == 3


def test_training_through_the_compiled_model(clock: Clock) -> None:
    clock({"after": 50.0})
    model = mlp()
    plain = copy.deepcopy(model)
    optimize_(model, X, config=replace(COMPILE, mode="train"))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    for _ in range(3):
        x = torch.randn(8, 16)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tags", [False, True])
def test_what_is_kept_is_compiled_and_its_guards_are_fresh(
    tags: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dict tags: trials write to modules, after which Dynamo would check every guard for ever."""
    clock({"after": 50.0})
    counters, graphs = torch._dynamo.utils.counters["stats"], []
    finish = finishing._compile

    def counted(*args: Any) -> None:
        graphs.append(counters["unique_graphs"])
        finish(*args)
        graphs.append(counters["unique_graphs"])

    monkeypatch.setattr(finishing, "_compile", counted)
    model = Functional().eval()
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=tags):
        assert region(optimize_(model, X, config=replace(COMPILE, families=()))).status == "kept"
        before, after = graphs
        assert after - before == tags
        run(model, X)
        assert counters["unique_graphs"] == after
        model.__dict__["forward"].release()
        run(model, X)
        assert counters["unique_graphs"] == after + tags


def test_a_model_that_cannot_be_compiled_at_last_is_left_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finishing, "preserved", interrupted)
    model = Functional().eval()
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        optimize_(model, X, config=replace(COMPILE, families=()))
    assert snapshot(model) == before
    assert "forward" not in model.__dict__


def test_without_being_asked_nothing_is_compiled(clock: Clock) -> None:
    clock({"after": 50.0})
    model = mlp().eval()
    result = optimize_(model, X)
    assert all(s.rule != "compiled" for s in result.sites)
    assert not isinstance(model.__dict__.get("forward"), CompiledForward)


def test_slower_is_put_back(clock: Clock) -> None:
    clock({"after": 150.0})
    model = mlp().eval()
    before = snapshot(model)
    result = optimize_(model, X, config=COMPILE)
    assert (region(result).status, region(result).code) == ("rejected", "slower_model")
    assert "0.67x" in region(result).reason
    assert result.plan.rewrites == ()
    assert snapshot(model) == before


def test_compiled_without_the_other_rewrites_may_be_faster(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"onednn": 50.0, "after": 50.0})
    real = measure.model_pair

    def pair(model: nn.Module, swaps: SwapSet, *args: Any, against: Any = None, **kw: Any) -> Any:
        found = real(model, swaps, *args, against=against, **kw)
        rival = () if against is None else [s.fqn for s in against.swaps]
        return type(found)(found.after, found.before) if list(rival) == [""] else found

    monkeypatch.setattr(measure, "model_pair", pair)
    model = mlp().eval()
    plain, before = copy.deepcopy(model), snapshot(model)
    result = optimize_(model, X, config=COMPILE)
    assert region(result).status == "kept", region(result)
    assert {s.code for s in result.sites if s.rule != "compiled"} == {"compiled_alone"}
    assert [r.route for r in result.plan.rewrites] == ["compile"]
    assert all("forward" not in vars(m) for m in model)
    torch.testing.assert_close(run(model, X), run(plain, X))
    plan = result.plan.to_json()
    result.revert()
    assert snapshot(model) == before
    assert apply_(model, plan).kept == 1


class Block(nn.Module):
    """Two linears and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Repeated blocks inside a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.body.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x


BLOCKS = ("body.layers.0", "body.layers.1")


def test_blocks_are_found() -> None:
    assert compiled.blocks_of(Stack()) == BLOCKS
    assert compiled.blocks_of(nn.Sequential(Block(), Block())) == ("0", "1")
    assert compiled.blocks_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == ()
    assert compiled.blocks_of(nn.Sequential(Block(), nn.ReLU())) == ()
    assert compiled.blocks_of(mlp()) == ()


@pytest.mark.parametrize("blocks_win", [True, False])
def test_blocks_one_by_one_may_be_faster(
    blocks_win: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})
    real = measure.model_pair

    def pair(model: nn.Module, swaps: SwapSet, *args: Any, against: Any = None, **kw: Any) -> Any:
        found = real(model, swaps, *args, against=against, **kw)
        rival = () if against is None else [s.fqn for s in against.swaps]
        slow = list(rival) == [""] and not blocks_win
        return type(found)(found.after, found.before) if slow else found

    monkeypatch.setattr(measure, "model_pair", pair)
    model = Stack().eval()
    plain, before = copy.deepcopy(model), snapshot(model)
    result = optimize_(model, X, config=replace(COMPILE, families=()))
    sites = {s.fqn: s for s in result.sites if s.rule == "compiled"}
    assert set(sites) == {"", *BLOCKS}
    told = {name: (s.status, s.code) for name, s in sites.items()}
    if blocks_win:
        assert told[""] == ("rejected", "blocks_faster")
        assert {told[name] for name in BLOCKS} == {("kept", "faster")}
        assert "in 2 graphs" in sites[BLOCKS[0]].reason
        assert result.plan.compiled == BLOCKS
    else:
        assert told[""] == ("kept", "faster")
        assert {told[name] for name in BLOCKS} == {("rejected", "slower_model")}
        assert result.plan.compiled == ("",)
    assert "and 2 blocks of it" in result.table(width=160)
    torch.testing.assert_close(run(model, X), run(plain, X))
    plan = result.plan.to_json()
    result.revert()
    assert snapshot(model) == before
    again = apply_(model, plan)
    assert again.plan.rewrites == result.plan.rewrites
    again.revert()
    assert snapshot(model) == before


def test_a_compiled_model_that_computes_something_else_is_put_back(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})
    real = CompiledForward.__call__

    def wrong(self: CompiledForward, *args: Any, **kwargs: Any) -> Any:
        return real(self, *args, **kwargs) * 1.001

    monkeypatch.setattr(CompiledForward, "__call__", wrong)
    model = mlp().eval()
    before = snapshot(model)
    result = optimize_(model, X, config=replace(COMPILE, families=()))
    assert (region(result).status, region(result).code) == ("rejected", "less_accurate")
    assert snapshot(model) == before


def test_a_second_time_there_is_nothing_to_do(clock: Clock) -> None:
    clock({"after": 50.0})
    model = mlp().eval()
    optimize_(model, X, config=replace(COMPILE, families=()))
    again = optimize_(model, X, config=replace(COMPILE, families=()))
    assert (region(again).status, region(again).code) == ("nothing_to_do", "already_rewritten")


@pytest.mark.parametrize(
    ("device", "graphs", "mode", "expected"),
    [
        ("cpu", True, "inference", ("default",)),
        ("cuda", False, "inference", ("default",)),
        ("cuda", True, "inference", (REDUCE_OVERHEAD, "default")),
        ("cuda", True, "train", ("default",)),
    ],
)
def test_modes(device: str, graphs: bool, mode: str, expected: tuple[str, ...]) -> None:
    config = Config(mode=mode, graphs=graphs, compile=True)
    runner = SimpleNamespace(device=torch.device(device))
    work: Any = SimpleNamespace(config=config, runner=runner)
    assert compiled._modes(work) == expected


def test_a_plan_with_another_mode_is_refused(clock: Clock) -> None:
    clock({"after": 50.0})
    model = mlp().eval()
    result = optimize_(model, X, config=replace(COMPILE, families=()))
    result.revert()
    plan = result.plan.to_json()
    (rewrite,) = plan["rewrites"]
    for change in ({"backend": "max-autotune"}, {"route": "graph"}, {"rule": "graphed"}):
        with pytest.raises(PlanError, match="unknown rewrite"):
            apply_(model, {**plan, "rewrites": [{**rewrite, **change}]})


def test_it_is_offered_where_pointwise_work_takes_the_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({})
    real = optimizing.capture

    def capture(*args: Any, **kwargs: Any) -> Any:
        report, seen = real(*args, **kwargs)
        finding = Finding(CODE, "", "", "", 50.0, 8.0, 42.0, 0.0, 1e6, "memory", {"share": 0.4})
        return replace(report, findings=(finding,)), seen

    monkeypatch.setattr(optimizing, "capture", capture)
    result = optimize_(mlp().eval(), X)
    (note,) = [n for n in result.notes if "pointwise work" in n]
    assert "40% of the time" in note
    assert "42 us" in note
    assert "Config(compile=True)" in note
    asked = optimize_(mlp().eval(), X, config=COMPILE)
    assert not any("ask for it" in n for n in asked.notes)
    assert region(asked).predicted_gain_us == 42.0


@pytest.mark.parametrize(("busy_us", "told"), [(20.0, True), (45.0, False)])
def test_where_launches_still_set_the_pace_graphs_are_offered(busy_us: float, told: bool) -> None:
    profile = SimpleNamespace(device_busy_us=busy_us)
    runner = SimpleNamespace(device=torch.device("cuda"))
    work: Any = SimpleNamespace(config=COMPILE, runner=runner, profile=profile, notes=[])
    pair = SimpleNamespace(after=SimpleNamespace(median_us=50.0))
    kept: Any = SimpleNamespace(pair=pair)
    compiled._note_graphs(work, kept)
    assert [("graphs=True" in n) for n in work.notes] == ([True] if told else [])
    work.config = replace(COMPILE, graphs=True)
    compiled._note_graphs(work, kept)
    assert len(work.notes) == told
