"""Chains that go through several modules: nested Sequentials, and blocks called one by one."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.function_mode import KnowingMode
from fastlinear.core.timing import Samples
from fastlinear.rewrite.evaluate import chains, site
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.fusion import Fusion, InForward
from fastlinear.rewrite.rules.mlp import findings
from fastlinear.rewrite.swap import forwards
from fastlinear.rewrite.swap.modules import SwapSet
from tests.rewrite.rewrite_models import Clock, run, snapshot

optimizing = importlib.import_module("fastlinear.rewrite.optimize")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A linear with its activation behind it, by name."""

    def __init__(self, n: int = 6) -> None:
        super().__init__()
        self.fc, self.drop, self.slope = nn.Linear(6, n), nn.Dropout(0.5), 0.01

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.leaky_relu(self.fc(x), self.slope))


def part(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), *more)


class Listed(nn.Module):
    """Blocks in a list, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(6, 4)
        self.other, self.twice = nn.Linear(6, 4), False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Branching(Listed):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.blocks
        h = first(x)
        return self.head(second(h)), h


class Called(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.blocks[0](x)))


class Tailed(Listed):
    """Activations behind the blocks' calls, and pairs of its own beside the chain."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(h) + F.relu(self.other(x))


class Wrapped(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.net(x), -1)


def listed(kind: Any, *blocks: Any) -> Any:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind(*(block() for block in blocks))

    return make


def relu() -> nn.Sequential:
    return part(nn.ReLU())


def short() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.ReLU())


Found = list[tuple[str, tuple[str, ...], str, str, tuple[str, ...]]]
MODELS: dict[str, tuple[Any, Found]] = {
    "nested Sequentials": (
        listed(nn.Sequential, relu, relu, lambda: nn.Linear(6, 4)),
        [("", ("0.0", "1.0", "2"), "relu", "none", ("0", "1"))],
    ),
    "three levels": (
        listed(nn.Sequential, lambda: nn.Sequential(relu(), relu()), relu),
        [
            ("0", ("0.0.0", "0.1.0"), "relu", "relu", ("0.0", "0.1")),
            ("", ("0.0.0", "0.1.0", "1.0"), "relu", "relu", ("0", "0.0", "0.1", "1")),
        ],
    ),
    "activations outside": (
        listed(nn.Sequential, part, nn.GELU, part, nn.GELU, lambda: nn.Linear(6, 4)),
        [("", ("0.0", "2.0", "4"), "gelu", "none", ("0", "2"))],
    ),
    "blocks in a list": (
        listed(Listed, Block, Block, Block),
        [
            (
                "",
                ("blocks.0.fc", "blocks.1.fc", "blocks.2.fc", "head"),
                "leaky_relu",
                "none",
                ("blocks.0", "blocks.1", "blocks.2"),
            )
        ],
    ),
    "blocks in a Sequential in a module": (
        lambda: Wrapped(listed(nn.Sequential, Block, Block)()),
        [("net", ("net.0.fc", "net.1.fc"), "leaky_relu", "leaky_relu", ("net.0", "net.1"))],
    ),
    "pairs of its own beside it": (
        listed(Tailed, part, part),
        [
            (
                "",
                ("blocks.0.0", "blocks.1.0", "head"),
                "tanh",
                "none",
                ("blocks.0", "blocks.1"),
            )
        ],
    ),
    "another chain of the same Sequential": (
        listed(
            nn.Sequential,
            relu,
            relu,
            lambda: nn.LayerNorm(6),
            lambda: nn.Linear(6, 6),
            nn.Tanh,
            lambda: nn.Linear(6, 6),
        ),
        [
            ("", ("0.0", "1.0"), "relu", "relu", ("0", "1")),
            ("", ("3", "5"), "tanh", "none", ()),
        ],
    ),
    "a linear of a block that is alone": (
        listed(nn.Sequential, short, relu),
        [("", ("0.2", "1.0"), "relu", "relu", ("0", "1"))],
    ),
    "a value read elsewhere": (
        listed(Branching, relu, relu),
        [("", ("blocks.1.0", "head"), "relu", "none", ("blocks.1",))],
    ),
    "a block called twice": (listed(Called, relu), []),
    "a norm between": (listed(nn.Sequential, relu, lambda: nn.LayerNorm(6), relu), []),
    "one block": (listed(nn.Sequential, lambda: part(nn.ReLU(), nn.Linear(6, 6))), []),
}


def prepared(model: nn.Module, mode: str = "inference") -> tuple[Any, list[Any]]:
    config = fl.Config(mode=mode)
    work = optimizing.prepare("test", model, X, config, None, lambda *_: None)
    candidates, _ = optimizing.watch(work, X, None)
    with optimizing.preserved(model, mode):
        return work, chains.match(work, candidates, ("mlp",))


def through_blocks(model: nn.Module, mode: str = "inference") -> list[Any]:
    """The chains through blocks, with what else there is of these forwards."""
    found = [c for c in prepared(model, mode)[1] if isinstance(c.forward, InForward)]
    where = {c.fqn for c in found if c.blocks}
    return [c for c in found if c.fqn in where]


def put(model: nn.Module, found: list[Any]) -> SwapSet:
    """The model with these chains, and nothing else, swapped."""
    swaps = SwapSet(swaps_of([c for chain in found for c in chains.members(chain)]))
    swaps.on()
    return swaps


class Counted(KnowingMode):
    """Notes the layers of every call of mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is forwards.mlp:
            self.calls.append(len(args[1]))
        return func(*args, **(kwargs or {}))


def as_tuple(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def plain(chain: Any) -> tuple[Any, ...]:
    problem = chain.problems[0]
    activations = problem.option("activation"), problem.option("final")
    return chain.fqn, chain.names, *activations, chain.blocks


@pytest.mark.parametrize("name", MODELS)
def test_what_counts_as_a_chain(name: str) -> None:
    make, expected = MODELS[name]
    assert [plain(c) for c in through_blocks(make().eval())] == expected


@pytest.mark.parametrize("name", [name for name, (_, found) in MODELS.items() if found])
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_the_rewritten_forward_computes_the_same(name: str, mode: str) -> None:
    model = MODELS[name][0]().train(mode == "train")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    other, before = copy.deepcopy(model), snapshot(model)
    outer: dict[str, Any] = {}
    for chain in through_blocks(model, mode):
        assert site.failure(chain) is None
        x = chain.calls.kinds[0].x
        torch.testing.assert_close(chain.before(x), chain.after(x))
        outer |= dict.fromkeys(chain.names, chain)
    found = list({id(c): c for c in outer.values()}.values())
    if not found:
        assert mode == "train"  # dropout, though it drops nothing now
        return
    swaps = put(model, found)
    with Counted() as counted:
        ours = model(X)
    assert sorted(counted.calls) == sorted(len(c.names) for c in found)
    theirs = other(X)
    for a, b in zip(as_tuple(ours), as_tuple(theirs), strict=True):
        torch.testing.assert_close(a, b)
    if mode == "train":
        for y in (ours, theirs):
            sum(t.square().sum() for t in as_tuple(y)).backward()
        for (n, a), (m, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
            assert n == m
            torch.testing.assert_close(a.grad, b.grad)
        model.zero_grad()
    swaps.revert()
    assert snapshot(model) == before


CHANGES: dict[str, Any] = {
    "a hook on a block": lambda m: m.blocks[1].register_forward_hook(lambda mod, a, y: y + 1),
    "a hook before a block": lambda m: m.blocks[1].register_forward_pre_hook(
        lambda mod, a: (a[0] + 1,)
    ),
    "a hook on a linear": lambda m: m.blocks[1].fc.register_forward_hook(lambda mod, a, y: y + 1),
    "a patched block": lambda m: setattr(m.blocks[0], "forward", lambda x: x),
    "another block": lambda m: m.blocks.__setitem__(0, nn.Identity()),
    "another setting of a block": lambda m: setattr(m.blocks[0], "slope", 0.5),
    "one block awake": lambda m: m.blocks[2].train(),
    "one dropout awake": lambda m: m.blocks[2].drop.train(),
    "a longer list": lambda m: m.blocks.append(Block()),
    "a Sequential with one more": lambda m: m.blocks[3].append(nn.Tanh()),
    "another activation in it": lambda m: m.blocks[3].__setitem__(1, nn.Tanh()),
    "another linear in it": lambda m: m.blocks[3].__setitem__(0, nn.Linear(6, 6)),
    "other weights": lambda m: nn.init.zeros_(m.blocks[0].fc.weight),
}


def changing() -> nn.Module:
    torch.manual_seed(0)
    return Listed(Block(), Block(), Block(), part(nn.LeakyReLU())).eval()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_runs_as_it_now_is(change: str) -> None:
    model = changing()
    found = through_blocks(model)
    assert [len(c.names) for c in found] == [5]
    other = copy.deepcopy(model)
    put(model, found)
    for m in (model, other):
        torch.manual_seed(1)
        CHANGES[change](m)
    torch.manual_seed(2)
    ours = model(X)
    torch.manual_seed(2)
    torch.testing.assert_close(ours, other(X))


def test_hooks_of_every_module_see_blocks_and_layers() -> None:
    model = changing()
    put(model, through_blocks(model))
    seen: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, y: seen.append(type(module).__name__)
    )
    try:
        model(X)
    finally:
        handle.remove()
    assert seen.count("Block") == 3
    assert seen.count("Linear") == 5
    assert "LeakyReLU" in seen


def test_a_copy_reads_its_own_weights() -> None:
    model = changing()
    put(model, through_blocks(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert model(X).abs().max() == 0
    assert twin(X).abs().max() > 0


def hooked() -> nn.Module:
    model = MODELS["nested Sequentials"][0]()
    model[1].register_forward_hook(lambda *_: None)
    return model


def dropped() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(part(nn.ReLU(), nn.Dropout(0.5)), relu())


STOPS: dict[str, tuple[Any, str, tuple[str, str], str]] = {
    "a hook on an inner block": (hooked, "inference", ("0.0", "1"), "forward hook"),
    "dropout in training": (dropped, "train", ("0.0", "1.0"), "dropout ('0.2') draws"),
    "dropout of a function": (
        listed(Listed, lambda: Drops(), relu),
        "train",
        ("blocks.0.fc", "blocks.1.0"),
        "draws numbers",
    ),
    "output used elsewhere": (
        MODELS["a value read elsewhere"][0],
        "inference",
        ("blocks.0.0", "blocks.1.0"),
        "is read elsewhere as well",
    ),
    "two results": (
        listed(Listed, lambda: Second(), relu),
        "inference",
        ("blocks.0", "blocks.1.0"),
        "cannot trace",
    ),
}


class Drops(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.relu(self.fc(x)), 0.5, self.training)


class Second(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x)) if x.sum() > -1e9 else x


@pytest.mark.parametrize("name", STOPS)
def test_where_a_chain_stops_is_a_finding_with_its_reason(name: str) -> None:
    make, mode, ends, reason = STOPS[name]
    model = make().train(mode == "train")
    work, found = prepared(model, mode)
    assert not any(set(ends) <= set(c.names) for c in found)
    (told,) = findings(work.session)
    finding = told.finding
    assert finding.code == "chain_stopped"
    assert [s[:2] for s in finding.details["stops"]][:1] == [list(ends)]
    assert reason in finding.message
    assert finding.flops > 0


@pytest.mark.parametrize("name", ["blocks in a list", "three levels", "one block"])
def test_a_whole_chain_is_no_finding(name: str) -> None:
    work, _ = prepared(MODELS[name][0]().eval())
    assert not findings(work.session)


def test_a_block_with_a_norm_is_no_part_of_a_chain_that_stops() -> None:
    model = nn.Sequential(relu(), nn.Sequential(nn.LayerNorm(6), *relu()), relu()).eval()
    model[1].register_forward_hook(lambda *_: None)
    work, _ = prepared(model)
    assert not findings(work.session)


@pytest.fixture
def longest_win(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """A chain gains over everything, and all end to end; the arms that took part by length."""
    clock({"onednn": 50.0, "pieces": 30.0, "layerwise": 40.0, "whole_cpp": 40.0, "after": 50.0})
    arms: list[tuple[int, str]] = []
    real = site.times

    def times(candidate: Any, runs: Any, device: Any, budget_s: float) -> Any:
        if not isinstance(candidate, Fusion):
            return real(candidate, runs, device, budget_s)
        for one in runs.values():
            one(candidate.calls.kinds[0].x)
        arms.extend((len(candidate.members), name) for name in runs)
        us = {name: (1.0 if name == "after" else 3.0,) * 5 for name in runs}
        return {n: Samples(n, t, "wall", 1, "clock") for n, t in us.items()}, 1

    monkeypatch.setattr(site, "times", times)
    return arms


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", ["three levels", "pairs of its own beside it"])
def test_optimize_save_apply_revert(
    name: str, mode: str, longest_win: list[tuple[int, str]]
) -> None:
    make, expected = MODELS[name]
    model = make().train(mode == "train")
    before, other = snapshot(model), copy.deepcopy(model)
    keys = list(model.state_dict())
    result = fl.optimize_(model, X, config=fl.Config(mode=mode, draws=2, optimizer_steps=2))
    chained = {s.fqn for s in result.sites if (s.status, s.route) == ("kept", "chain")}
    assert chained == set(expected[-1][1]), result.table()
    assert {r.parent_fqn for r in result.plan.rewrites if r.route == "chain"} == {""}
    assert (3, "after") in longest_win
    assert (3, "layers") in longest_win  # shorter chains, or pairs, are a rival
    with Counted() as counted:
        torch.testing.assert_close(run(model, X), run(other, X))
    assert counted.calls == [3]
    assert list(model.state_dict()) == keys
    plan = json.loads(json.dumps(result.plan.to_json()))
    result.revert()
    assert snapshot(model) == before
    again = fl.apply_(model, plan)
    assert again.plan.rewrites == result.plan.rewrites
    again.revert()
    assert snapshot(model) == before


def test_where_the_longer_chain_loses_the_shorter_stay(
    longest_win: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their linears are all in the longer chain; a plan says which of them it was."""
    real = chains._gains
    monkeypatch.setattr(chains, "_gains", lambda w, c, *t: len(c.members) == 2 and real(w, c, *t))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(relu(), relu()) for _ in range(2))).eval()
    result = fl.optimize_(model, X)
    assert result.kept == 4
    assert {r.parent_fqn for r in result.plan.rewrites} == {"0", "1"}
    plan = result.plan.to_json()
    result.revert()
    again = fl.apply_(model, plan)
    assert again.plan.rewrites == result.plan.rewrites


def test_what_is_left_of_a_shorter_chain_is_as_it_is_alone() -> None:
    model = nn.Sequential(*(nn.Sequential(relu(), relu()) for _ in range(2))).eval()
    _, found = prepared(model)
    first, _, longer = sorted(found, key=lambda c: (len(c.members), c.fqn))
    alone = {c.fqn: c for c in first.members[:1]}
    single = {c.fqn: c for c in chains.members(first)}
    assert chains._in_the_way(longer, single) is None
    part = dataclasses.replace(longer, names=(), members=longer.members[1:])
    assert "'0.0.0' is rewritten in the forward of its block '0'" in chains._in_the_way(
        part, single
    )
    assert chains._with(part, single, alone)["0.0.0"] is alone["0.0.0"]
    assert "0.0.0" not in chains._with(part, single, {})
    taken = {c.fqn: c for c in chains.members(part)}
    other = dataclasses.replace(first, names=(), members=longer.members[:1])
    assert "is part of another chain's" in chains._in_the_way(other, taken)
    assert chains._in_the_way(first, taken) is None  # it would take the other's place


def test_nested_blocks_are_one_call_in_earnest() -> None:
    """Six layers at batch 1 cost PyTorch's overhead six times: measured, no help from a mock."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(48, 48), nn.ReLU()) for _ in range(6)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 48)
    expected = run(model, x)
    result = fl.optimize_(model, x)
    assert result.kept == 6, result.table()
    assert {(s.rule, s.route) for s in result.sites} == {("mlp", "chain")}
    assert result.speedup.low > 1.0
    torch.testing.assert_close(run(model, x), expected)
