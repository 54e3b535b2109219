"""The whole model as CUDA graphs: offered, tried when asked for, kept if faster, undone.

On a machine without a GPU a tape stands in for CUDA's graphs; see ``tests/core/graph_tape.py``.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastlinear.core.settings import Config
from fastlinear.profile.diagnose import Step
from fastlinear.profile.launch_bound import launch_bound
from fastlinear.profile.records import Record
from fastlinear.rewrite import apply_, optimize_
from fastlinear.rewrite.evaluate import graphs as choose_graph
from fastlinear.rewrite.evaluate import measure, try_graph
from fastlinear.rewrite.swap.graph_forward import GraphForward, with_graph
from fastlinear.rewrite.swap.modules import SwapSet
from tests.rewrite.rewrite_models import Clock, Functional, mlp, on_cuda, run, snapshot

optimizing = sys.modules["fastlinear.rewrite.optimize"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
GRAPHS = Config(graphs=True, draws=2, optimizer_steps=2)


def region(result: Any) -> Any:
    (found,) = [s for s in result.sites if s.rule == "graphed"]
    return found


@pytest.mark.parametrize("make", [mlp, Functional])
@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("families", [None, ()])
def test_optimize_save_apply_revert(
    make: Any, mode: str, families: Any, tape: None, clock: Clock
) -> None:
    clock({"onednn": 50.0, "pieces": 50.0, "after": 50.0})
    model = make().train(mode == "train")
    plain, before = copy.deepcopy(model), snapshot(model)
    config = replace(GRAPHS, mode=mode, families=families)
    result = optimize_(model, X, config=config)
    assert region(result).status == "kept", region(result)
    assert all(v.passed for v in result.verdicts)
    linears = {s.status for s in result.sites if s.rule != "graphed"}
    assert ("kept" in linears) == (families is None)
    forward = model.__dict__["forward"]
    assert isinstance(forward, GraphForward)
    model.eval()
    plain.eval()
    for _ in range(3):
        x = torch.randn(8, 16)
        torch.testing.assert_close(run(model, x), run(plain, x))
    assert forward.replayed == 3
    plan = json.loads(json.dumps(result.plan.to_json()))
    model.train(mode == "train")
    result.revert()
    assert snapshot(model) == before
    assert forward.replayed == 0
    again = apply_(model, plan)
    assert region(again).status == "kept"
    assert again.plan.rewrites == result.plan.rewrites
    again.revert()
    assert snapshot(model) == before


def test_training_through_the_kept_graph(tape: None, clock: Clock) -> None:
    clock({"after": 50.0})
    model = mlp()
    plain = copy.deepcopy(model)
    optimize_(model, X, config=replace(GRAPHS, mode="train"))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    for _ in range(3):
        x = torch.randn(8, 16)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    assert model.__dict__["forward"].replayed == 3
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_without_being_asked_nothing_is_recorded(tape: None, clock: Clock) -> None:
    clock({"after": 50.0})
    model = mlp().eval()
    result = optimize_(model, X)
    assert all(s.rule != "graphed" for s in result.sites)
    assert not isinstance(model.__dict__.get("forward"), GraphForward)


def test_graphs_without_the_other_rewrites_may_be_faster(
    tape: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the linears' rewrites inside it gains nothing over them; alone it does."""
    clock({"onednn": 50.0, "after": 50.0})
    real = measure.model_pair

    def pair(model: nn.Module, swaps: SwapSet, *args: Any, **kwargs: Any) -> Any:
        found = real(model, swaps, *args, **kwargs)
        graphed = swaps.swaps and swaps.swaps[-1].bind is not MethodType
        inside = graphed and len(swaps.swaps) > 1
        return type(found)(found.before, found.before) if inside else found

    monkeypatch.setattr(measure, "model_pair", pair)
    model = mlp().eval()
    plain, before = copy.deepcopy(model), snapshot(model)
    result = optimize_(model, X, config=GRAPHS)
    assert region(result).status == "kept"
    assert {s.code for s in result.sites if s.rule != "graphed"} == {"graph_alone"}
    assert [r.route for r in result.plan.rewrites] == ["graph"]
    assert all("forward" not in vars(m) for m in model)
    torch.testing.assert_close(run(model, X), run(plain, X))
    plan = result.plan.to_json()
    result.revert()
    assert snapshot(model) == before
    assert apply_(model, plan).kept == 1


def test_slower_graphs_are_put_back(tape: None, clock: Clock) -> None:
    clock({"after": 150.0})
    model = mlp().eval()
    before = snapshot(model)
    result = optimize_(model, X, config=GRAPHS)
    assert (region(result).status, region(result).code) == ("rejected", "slower_model")
    assert "0.67x" in region(result).reason
    assert result.plan.rewrites == ()
    assert snapshot(model) == before


def test_a_graph_that_computes_something_else_is_put_back(
    tape: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})
    real = GraphForward.__call__

    def wrong(self: GraphForward, *args: Any, **kwargs: Any) -> Any:
        return real(self, *args, **kwargs) * 1.001

    monkeypatch.setattr(GraphForward, "__call__", wrong)
    for mode in ("inference", "train"):
        model = mlp().train(mode == "train")
        before = snapshot(model)
        result = optimize_(model, X, config=replace(GRAPHS, mode=mode, families=()))
        assert (region(result).status, region(result).code) == ("rejected", "less_accurate")
        assert snapshot(model) == before


class Reads(nn.Module):
    """A value decides."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y if float(y.sum()) > 0 else -y


def test_control_flow_on_values_is_refused_with_its_reason(tape: None, clock: Clock) -> None:
    clock({"after": 50.0})
    model = Reads().eval()
    before = snapshot(model)
    result = optimize_(model, X, config=GRAPHS)
    assert (region(result).status, region(result).code) == ("refused", "no_graph")
    assert "graphed" in region(result).reason
    result.revert()
    assert snapshot(model) == before


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls, self.seen = nn.Linear(16, 16), 0, [1]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x)


class Logs(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return self.fc(x)


@pytest.mark.parametrize(("kind", "what"), [(Counts, "calls"), (Logs, "seen")])
def test_what_a_replay_would_lose_is_refused(
    kind: Any, what: str, tape: None, clock: Clock
) -> None:
    clock({"after": 50.0})
    result = optimize_(nn.Sequential(kind()).eval(), X, config=replace(GRAPHS, families=()))
    assert (region(result).status, region(result).code) == ("refused", "python_state")
    assert what in region(result).reason


def test_a_cpu_has_no_cuda_graphs(tmp_path: Path) -> None:
    result = optimize_(mlp().eval(), X, config=replace(GRAPHS, families=()))
    assert (region(result).status, region(result).code) == ("refused", "needs_cuda")
    assert "(model)" in result.table()
    assert "3 linear sites and the whole model" in result.table()
    assert "(model)" in result.html(tmp_path / "page.html").read_text()
    assert result.refused >= 1


def test_a_hook_on_the_model_is_refused(tape: None, clock: Clock) -> None:
    clock({"after": 50.0})
    model = mlp().eval()
    model.register_forward_hook(lambda *_: None)
    result = optimize_(model, X, config=replace(GRAPHS, families=()))
    assert (region(result).status, region(result).code) == ("refused", "hooks")


def graphed_mlp() -> tuple[nn.Module, SwapSet]:
    model = mlp().eval()
    swaps = SwapSet(with_graph((), model))
    swaps.on()
    return model, swaps


def test_copies_record_their_own_and_pickles_load_plain(tape: None) -> None:
    model, _ = graphed_mlp()
    expected = run(model, X)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.testing.assert_close(run(twin, X), expected)
    assert twin.__dict__["forward"].replayed == 1
    assert run(model, X).abs().max() == 0
    loaded = pickle.loads(pickle.dumps(twin))
    torch.testing.assert_close(run(loaded, X), expected)
    assert "forward" not in loaded.__dict__
    replica = twin._replicate_for_data_parallel()
    assert not isinstance(replica.forward, GraphForward)


def test_a_model_is_freed_with_its_graphs(tape: None) -> None:
    model, swaps = graphed_mlp()
    run(model, X)
    gone = weakref.ref(model)
    del model, swaps
    gc.collect()
    assert gone() is None


def test_a_default_device_is_no_watcher(tape: None) -> None:
    model, _ = graphed_mlp()
    run(model, X)
    torch.set_default_device("cpu")
    try:
        run(model, X)
        with torch.device("cpu"):
            run(model, X)
    finally:
        torch.set_default_device(None)
    assert model.__dict__["forward"].replayed == 3


def test_watchers_see_every_layer(tape: None) -> None:
    model, _ = graphed_mlp()
    run(model, X)
    seen: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, y: seen.append(type(module).__name__)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it runs plainly without a word
            run(model, X)
    finally:
        handle.remove()
    assert seen.count("Linear") == 3

    class Ops(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Ops():
        run(model, X)
    assert seen.count("linear") == 3


@pytest.mark.parametrize("recorded", [False, True])
def test_transforms_over_parameters_see_the_model(recorded: bool, tape: None) -> None:
    model, swaps = graphed_mlp()
    if recorded:
        run(model, X)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    both = {n: torch.stack([w, 2 * w]) for n, w in weights.items()}

    def loss(weights: Any) -> Any:
        return torch.func.functional_call(model, weights, (X,)).sum()

    def found() -> Any:
        return torch.func.grad(loss)(weights), torch.func.vmap(loss)(both)

    ours = found()
    if not recorded:
        run(model, X)
    assert model.__dict__["forward"].replayed == 1
    swaps.off()
    torch.testing.assert_close(ours, found())


@pytest.mark.parametrize("recorded", [False, True])
def test_checkpoints_save_what_the_model_saves(recorded: bool, tape: None) -> None:
    model, swaps = graphed_mlp()
    x = X.clone().requires_grad_()

    def gradient(forward: Any) -> Any:
        return torch.autograd.grad(forward().square().sum(), [x, *model.parameters()])

    def checkpointed() -> Any:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    if recorded:
        gradient(lambda: model(x))
    y = checkpointed()
    gradient(lambda: model(x))  # recorded between the forward and its backward
    ours = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    assert model.__dict__["forward"].replayed == 1 + recorded
    swaps.off()
    torch.testing.assert_close(ours, gradient(checkpointed))


def test_another_shape_and_changed_weights(tape: None) -> None:
    model, _ = graphed_mlp()
    plain = mlp().eval()
    plain.load_state_dict(model.state_dict())
    for rows in (8, 3, 8):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(run(model, x), run(plain, x))
        with torch.no_grad():
            for p in (*model.parameters(), *plain.parameters()):
                p.mul_(1.5)


def test_a_trial_that_raises_leaves_the_model(
    tape: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})
    model = mlp().eval()
    before = snapshot(model)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(try_graph, "verdicts_of", stop)
    with pytest.raises(KeyboardInterrupt):
        optimize_(model, X, config=replace(GRAPHS, families=()))
    assert snapshot(model) == before


# ------------------------------------------------------------------------------------- the offer


def step(busy: float, device: str = "cuda", mode: str = "inference") -> Step:
    return Step(mode, device, 200.0, busy, "highest", 0.0)


def record(op: str) -> Record:
    return Record("", "Net", op, "forward", 8, 20.0, 2.0)


def finding(busy: float, *ops: str, device: str = "cuda", mode: str = "inference") -> Any:
    records = tuple(record(op) for op in ops)
    return launch_bound(step(busy, device, mode), records, (), lambda *_: None)


def test_the_offer() -> None:
    assert finding(160.0, "aten::linear") is None  # no kernel runs for 20% of the step
    offered = finding(50.0, "aten::linear")
    assert offered.details["offer"] == "graphed"
    assert offered.predicted_gain_us == 150.0
    assert "fl.graphed" in offered.message
    assert finding(2.0, "aten::linear").predicted_gain_us == 170.0  # a replay costs 30
    waits = finding(50.0, "aten::linear", "aten::item")
    assert "offer" not in waits.details
    assert "aten::item" in waits.details["no_graph"]
    assert "fl.graphed" not in waits.message


def test_the_offer_is_noted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock({})
    work = optimizing.prepare("t", mlp().eval(), X, Config(), None, lambda *_: None)
    optimizing.watch(work, X, None)
    work.profile = replace(work.profile, findings=(finding(50.0, "aten::linear"),))
    assert choose_graph.choose_graph(on_cuda(work), []) is None
    assert any("Config(graphs=True)" in n and "150 us" in n for n in work.notes)


def test_reasons_not_to_try() -> None:
    work = optimizing.prepare("t", mlp().eval(), X, GRAPHS, None, lambda *_: None)
    optimizing.watch(work, X, None)
    cuda = on_cuda(work)
    assert choose_graph._why_not(cuda, None, False).code == "not_launch_bound"
    waits = finding(50.0, "aten::item")
    assert choose_graph._why_not(cuda, waits, False).code == "waits_for_device"
    assert choose_graph._why_not(cuda, finding(50.0, "aten::linear"), False) is None
    assert choose_graph._why_not(cuda, None, True) is None


def test_a_plan_without_its_device_is_refused_elsewhere(tape: None, clock: Clock) -> None:
    from fastlinear.core.errors import PlanError

    clock({"after": 50.0})
    model = mlp().eval()
    result = optimize_(model, X, config=replace(GRAPHS, families=()))
    plan = result.plan.to_json()
    result.revert()
    plan["rewrites"][0]["rule"] = "linear_act"
    with pytest.raises(PlanError, match="bad or missing"):
        apply_(model, plan)


def other_work(monkeypatch: pytest.MonkeyPatch, parts_faster: bool) -> nn.Module:
    """A model whose replay takes far longer than its kernels, and what its part's replay takes."""
    real_capture, real_pair = optimizing.capture, measure.model_pair

    def capture(*args: Any, **kwargs: Any) -> Any:
        report, seen = real_capture(*args, **kwargs)
        return replace(report, device_busy_us=10.0), seen

    def pair(model: nn.Module, swaps: SwapSet, *args: Any, against: Any = None, **kw: Any) -> Any:
        found = real_pair(model, swaps, *args, against=against, **kw)
        of_parts = [s.fqn for s in swaps.swaps] == ["0"]
        rival = [s.fqn for s in against.swaps] if against is not None else []
        slow = of_parts and rival == [""] and not parts_faster
        return type(found)(found.after, found.before) if slow else found

    def regions(work: Any, kept: Any) -> Any:
        found = try_graph.tried(work, ["0"], kept, (), "without it", planned=False)
        assert isinstance(found, try_graph.KeptGraph)
        try_graph.settle(work, "0", 1.0, found.outcome)
        return found

    monkeypatch.setattr(optimizing, "capture", capture)
    monkeypatch.setattr(measure, "model_pair", pair)
    monkeypatch.setattr(choose_graph, "choose_regions", regions)
    return nn.Sequential(mlp(), nn.Linear(4, 4)).eval()


@pytest.mark.parametrize("parts_faster", [True, False])
def test_parts_are_tried_where_the_whole_does_other_work_when_recorded(
    parts_faster: bool, tape: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})
    model = other_work(monkeypatch, parts_faster)
    plain, before = copy.deepcopy(model), snapshot(model)
    result = optimize_(model, X, config=replace(GRAPHS, families=()))
    codes = {s.fqn: (s.status, s.code) for s in result.sites if s.rule == "graphed"}
    if parts_faster:
        assert codes == {"": ("rejected", "parts_faster"), "0": ("kept", "faster")}
        assert result.plan.graphed == ("0",)
    else:
        assert codes == {"": ("kept", "faster"), "0": ("rejected", "whole_faster")}
        assert result.plan.graphed == ("",)
    torch.testing.assert_close(run(model, X), run(plain, X))
    result.revert()
    assert snapshot(model) == before
