"""Parts of a model as CUDA graphs, where the model as a whole cannot be one.

The profile is a GPU's, made up; a tape stands in for the graphs.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastlinear.core.settings import Config
from fastlinear.profile.diagnose import Step, diagnose
from fastlinear.profile.records import Record
from fastlinear.rewrite import apply_, optimize_
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.swap.graph_forward import GraphForward
from tests.rewrite.rewrite_models import Clock, on_cuda, run, snapshot

optimizing = sys.modules["fastlinear.rewrite.optimize"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
GRAPHS = Config(graphs=True, families=(), draws=2, optimizer_steps=2)


class Block(nn.Module):
    """Two linears, no surprises."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Fickle(nn.Module):
    """A value decides which block runs again; the blocks themselves are regular."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = Block(), nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if float(x.sum()) > 1e6:
            x = -x
        for block in self.blocks:
            x = block(x)
        return x


class Wrapped(nn.Module):
    """The same one level down."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Told(nn.Module):
    """The model writes what its block reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.other, self.step = Scaled(), Block(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.step = 1 - self.step
        self.block.gain = 1.0 + 0 * self.step
        return self.other(self.block(x))


class Scaled(Block):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


@pytest.fixture
def gpu_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles as of a GPU on which every module takes the host 100 us and the device 5."""
    real = optimizing.capture

    def capture(model: nn.Module, inputs: Any, mode: str, **how: Any) -> Any:
        report, seen = real(model, inputs, mode, **how)
        seen_names = {r.fqn for r in report.records}  # by their times: another order every time
        called = {n: type(m).__name__ for n, m in model.named_modules() if n in seen_names}
        records = [Record("", type(model).__name__, "aten::item", "forward", 1, 20.0, 0.0)]
        for fqn, name in called.items():
            records.append(Record(fqn, name, "(python)", "forward", 1, 100.0, 0.0))
            records.append(Record(fqn, name, "aten::linear", "forward", 2, 400.0, 5.0))
        step = Step(mode, "cuda", 500.0 * len(called), 5.0 * len(called), "high", 0.0)
        findings = diagnose(step, tuple(records), (), {}, lambda *_: None)
        return replace(
            report,
            device="cuda:0",
            step_us=step.step_us,
            device_busy_us=step.busy_us,
            records=tuple(records),
            findings=findings,
        ), seen

    monkeypatch.setattr(optimizing, "capture", capture)


@pytest.fixture
def slower(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``slower("first")``: the step with that module's graph takes twice the time of before."""
    real = measure.model_pair
    names: set[str] = set()

    def pair(model: nn.Module, swaps: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(model, swaps, *args, **kwargs)
        if names & {s.fqn for s in swaps.swaps}:
            return type(found)(found.after, found.before)
        return found

    monkeypatch.setattr(measure, "model_pair", pair)
    return names.add


def parts(result: Any) -> dict[str, tuple[str, str]]:
    return {s.fqn: (s.status, s.code) for s in result.sites if s.rule == "graphed" and s.fqn}


def replaying(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(vars(m).get("forward"), GraphForward)]


BLOCKS = ["first", "blocks.0", "blocks.1"]


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("families", [None, ()])
def test_optimize_save_apply_revert(
    mode: str, families: Any, tape: None, gpu_profile: None, clock: Clock
) -> None:
    clock({"onednn": 50.0, "pieces": 50.0, "after": 50.0})
    model = Fickle().train(mode == "train")
    plain, before = copy.deepcopy(model), snapshot(model)
    result = optimize_(model, X, config=replace(GRAPHS, mode=mode, families=families))
    (whole,) = [s for s in result.sites if s.rule == "graphed" and not s.fqn]
    assert (whole.status, whole.code) == ("refused", "no_graph")
    assert parts(result) == dict.fromkeys(BLOCKS, ("kept", "faster"))
    assert replaying(model) == BLOCKS
    assert all(v.passed for v in result.verdicts)
    assert result.speedup.median == 2.0
    for _ in range(3):
        x = torch.randn(8, 16)
        torch.testing.assert_close(run(model, x), run(plain, x))
    assert all(model.get_submodule(n).__dict__["forward"].replayed == 3 for n in BLOCKS)
    offers = {f.fqn: f for f in result.findings if f.code == "launch_bound_region"}
    assert set(offers) == set(BLOCKS)
    assert all(
        s.predicted_gain_us == offers[s.fqn].predicted_gain_us
        for s in result.sites
        if s.fqn in offers and s.rule == "graphed"
    )
    table = result.table()
    assert "first (+2 alike)" in table
    assert "6 linear sites and the whole model and 3 of its parts" in table
    plan = json.loads(json.dumps(result.plan.to_json()))
    result.revert()
    assert snapshot(model) == before
    again = apply_(model, plan)
    assert parts(again) == dict.fromkeys(BLOCKS, ("kept", "in_plan"))
    assert again.plan.rewrites == result.plan.rewrites
    assert replaying(model) == BLOCKS
    again.revert()
    assert snapshot(model) == before


def test_training_through_kept_parts(tape: None, gpu_profile: None, clock: Clock) -> None:
    clock({"after": 50.0})
    model = Fickle()
    plain = copy.deepcopy(model)
    optimize_(model, X, config=replace(GRAPHS, mode="train"))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    for _ in range(3):
        x = torch.randn(8, 16)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_part_that_cannot_be_recorded_is_taken_apart(
    tape: None, gpu_profile: None, clock: Clock
) -> None:
    clock({"after": 50.0})
    model = Wrapped(Wrapped(Fickle()))
    result = optimize_(model.eval(), X, config=GRAPHS)
    told = parts(result)
    assert told.pop("inner") == ("refused", "no_graph")
    assert told.pop("inner.inner") == ("refused", "no_graph")
    assert told == {f"inner.inner.{n}": ("kept", "faster") for n in BLOCKS}


def test_parts_that_differ_are_tried_in_turn_and_stay_together(
    tape: None, gpu_profile: None, clock: Clock
) -> None:
    clock({"after": 50.0})
    model = Fickle().eval()
    model.first = Wrapped(model.first)
    plain = copy.deepcopy(model)
    result = optimize_(model, X, config=GRAPHS)
    assert parts(result) == dict.fromkeys(BLOCKS, ("kept", "faster"))
    assert replaying(model) == BLOCKS
    (first,) = {s.reason for s in result.sites if s.rule == "graphed" and s.fqn == "first"}
    (others,) = {s.reason for s in result.sites if s.rule == "graphed" and "blocks" in s.fqn}
    assert "without it" in first
    assert "without these 2 parts" in others
    torch.testing.assert_close(run(model, X), run(plain, X))


def test_only_what_is_faster_stays(
    tape: None, gpu_profile: None, clock: Clock, slower: Any
) -> None:
    clock({"after": 50.0})
    slower("blocks.0")
    model = Fickle().eval()
    model.first = Wrapped(model.first)  # of another class: a trial of its own
    before = snapshot(model)
    result = optimize_(model, X, config=GRAPHS)
    assert parts(result) == {
        "first": ("kept", "faster"),
        "blocks.0": ("rejected", "slower_model"),
        "blocks.1": ("rejected", "slower_model"),
    }
    assert replaying(model) == ["first"]
    assert [r.fqn for r in result.plan.rewrites] == ["first"]
    result.revert()
    assert snapshot(model) == before


def test_what_computes_something_else_is_put_back(
    tape: None, gpu_profile: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})
    real = GraphForward.__call__
    monkeypatch.setattr(GraphForward, "__call__", lambda self, x: real(self, x) * 1.001)
    model = Fickle().eval()
    before = snapshot(model)
    result = optimize_(model, X, config=GRAPHS)
    assert set(parts(result).values()) == {("rejected", "less_accurate")}
    assert snapshot(model) == before


def test_state_that_the_model_writes_and_a_part_reads(
    tape: None, gpu_profile: None, clock: Clock
) -> None:
    clock({"after": 50.0})
    model = Told().eval()
    result = optimize_(model, X, config=GRAPHS)
    told = parts(result)
    assert told["block"] == ("refused", "python_state")
    assert told["other"] == ("kept", "faster")
    (reason,) = [s.reason for s in result.sites if s.rule == "graphed" and s.fqn == "block"]
    assert "gain" in reason


def test_hooks_on_a_part_are_refused(tape: None, gpu_profile: None, clock: Clock) -> None:
    clock({"after": 50.0})
    model = Fickle().eval()
    model.first.register_forward_hook(lambda *_: None)
    told = parts(optimize_(model, X, config=GRAPHS))
    assert told["first"] == ("refused", "hooks")
    assert told["blocks.0"] == told["blocks.1"] == ("kept", "faster")


def test_parts_that_are_graphs_already_are_left_alone(
    tape: None, gpu_profile: None, clock: Clock
) -> None:
    clock({"after": 50.0})
    model = Fickle().eval()
    optimize_(model, X, config=GRAPHS)
    again = optimize_(model, X, config=GRAPHS)
    assert parts(again) == dict.fromkeys(BLOCKS, ("nothing_to_do", "already_rewritten"))
    quiet = optimize_(model, X, config=replace(GRAPHS, graphs=False))
    assert all("graphs" not in n for n in quiet.notes)
    assert replaying(model) == BLOCKS


def test_without_being_asked_parts_are_named(tape: None, gpu_profile: None, clock: Clock) -> None:
    clock({"after": 50.0})
    model = Fickle().eval()
    result = optimize_(model, X, config=replace(GRAPHS, graphs=False))
    assert parts(result) == {}
    assert replaying(model) == []
    (note,) = [n for n in result.notes if "Config(graphs=True)" in n]
    assert "first, blocks.0, blocks.1" in note
    offers = [f for f in result.findings if f.code == "launch_bound_region"]
    assert [f.fqn for f in offers] == BLOCKS
    assert all("--graphs" in f.message for f in offers)


def test_a_model_refused_by_its_code_offers_its_parts(
    tape: None, gpu_profile: None, clock: Clock
) -> None:
    """The profile sees no wait, but the model writes attributes: its parts become findings."""
    clock({"after": 50.0})
    work = optimizing.prepare("t", Told().eval(), X, Config(families=()), None, lambda *_: None)
    optimizing.watch(work, X, None)
    offer = replace(work.profile.findings[0], code="launch_bound", fqn="")
    offer = replace(offer, details={"offer": "graphed"})
    work.profile = replace(work.profile, findings=(offer,))
    twin = on_cuda(work)
    optimizing.choose_graph(twin, [])
    assert [f.fqn for f in twin.profile.findings[1:]] == ["other", "block.up", "block.down"]
    assert any("other" in n for n in work.notes)


def test_a_cpu_says_nothing_of_parts(clock: Clock) -> None:
    clock({"after": 50.0})
    for graphs in (False, True):
        result = optimize_(Fickle().eval(), X, config=replace(GRAPHS, graphs=graphs))
        assert parts(result) == {}
        assert all(f.code != "launch_bound_region" for f in result.findings)
        assert all("graphs" not in n for n in result.notes)


def test_a_plan_whose_part_is_refused_says_so(tape: None, gpu_profile: None, clock: Clock) -> None:
    clock({"after": 50.0})
    model = Fickle().eval()
    result = optimize_(model, X, config=GRAPHS)
    plan = result.plan.to_json()
    result.revert()
    model.first.register_forward_hook(lambda *_: None)
    again = apply_(model, plan)
    assert parts(again)["first"] == ("refused", "hooks")
    assert replaying(model) == BLOCKS[1:]
    assert [r.fqn for r in again.plan.rewrites] == BLOCKS[1:]


# ---------------------------------------------------------------------------------- on a device


class Deep(nn.Module):
    """Blocks whose kernels take less time than their launches, and a value that decides between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(*self.layers()) for _ in range(3)]
        self.first, self.blocks = layers[0], nn.ModuleList(layers[1:])

    @staticmethod
    def layers() -> list[nn.Module]:
        return [m for _ in range(12) for m in (nn.Linear(64, 64), nn.LayerNorm(64))]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if float(x.sum()) > 1e6:
            x = -x
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_parts_on_the_device(mode: str) -> None:
    model, x = Deep().cuda().train(mode == "train"), torch.randn(16, 64, device="cuda")
    keys = [tuple(vars(m)) for m in model.modules()]
    expected = run(model, x)
    config = replace(GRAPHS, mode=mode, time_budget_s=6)
    offered = optimize_(model, x, config=replace(config, graphs=False))
    print(offered.table())
    offers = [f.fqn for f in offered.findings if f.code == "launch_bound_region"]
    assert offers == BLOCKS or sorted(offers) == sorted(BLOCKS)
    assert any("Config(graphs=True)" in n for n in offered.notes)
    result = optimize_(model, x, config=config)
    print(result.table())
    assert all(v.passed for v in result.verdicts)
    assert parts(result) == dict.fromkeys(offers, ("kept", "faster"))
    assert result.speedup.low > 1.0
    for _ in range(3):
        fresh = torch.randn(16, 64, device="cuda")
        got = run(model, fresh)
        result._swaps.off()
        torch.testing.assert_close(got, run(model, fresh))
        result._swaps.on()
    plan = result.plan.to_json()
    result.revert()
    assert [tuple(vars(m)) for m in model.modules()] == keys
    again = apply_(model, plan, x)
    print(again.table())
    assert parts(again) == dict.fromkeys(offers, ("kept", "in_plan"))
    again.revert()
    assert torch.equal(run(model, x), expected)


@pytest.mark.gpu
def test_a_model_that_is_busy_elsewhere_has_launch_bound_parts_too() -> None:
    """Most of the step is one large product; what follows a value read from it is launches."""
    torch.manual_seed(0)

    class Busy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(8192, 8192), nn.Sequential(*Deep.layers())

        def forward(self, x: Tensor) -> Tensor:
            y = self.large(x)
            return self.small(x[:16, :64] * float(y.sum() > 0))

    model, x = Busy().cuda().eval(), torch.randn(2048, 8192, device="cuda")
    result = optimize_(model, x, config=replace(GRAPHS, time_budget_s=4))
    print(result.table())
    print([(f.code, f.fqn, f.message) for f in result.findings])
    assert parts(result) == {"small": ("kept", "faster")}
    (reason,) = [s.reason for s in result.sites if s.rule == "graphed" and s.fqn]
    held = re.search(r"hold about ([\d.]+) MiB", reason)
    assert held is None or float(held[1]) < 256, "no weight of 8192 x 8192 in float64 among them"
