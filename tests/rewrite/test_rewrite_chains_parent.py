"""Chains written as code: a parent's forward calls linear after linear."""

from __future__ import annotations

import copy
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
from fastlinear.rewrite.swap import forwards
from fastlinear.rewrite.swap.modules import SwapSet
from tests.rewrite.rewrite_models import Clock, run, snapshot

optimizing = importlib.import_module("fastlinear.rewrite.optimize")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Parts(nn.Module):
    """Layers for the forwards below; every width is 6 but the last, 4."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head, self.other = nn.Linear(6, 4), nn.Linear(6, 4)
        self.act, self.drop, self.same = nn.GELU(), nn.Dropout(0.5), nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=i > 0) for i in range(3)])
        self.p = 0.5


class Functions(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.head(x)


class Nested(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.fc1(x)))


class Methods(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc2(self.fc1(x * 2).tanh()).tanh()).sigmoid() + 1


class InPlace(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu_(self.fc1(x)))


class Loop(Parts):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.silu(layer(x))
        return x


class Counting(Parts):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


class TensorsLength(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fc1(x))) * len(x)


class Asleep(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.fc1(x)))
        x = F.dropout(F.relu(self.same(self.fc2(x))), self.p, self.training)
        return self.drop(self.head(x))


class TwoHeads(Parts):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = F.relu(self.fc1(x))
        return self.head(features), self.other(features)


class HeadsOfAChain(Parts):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = F.relu(self.fc2(F.relu(self.fc1(x))))
        return self.head(features), self.other(features)


class TwoKinds(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc3(F.relu(self.fc2(F.relu(self.fc1(x))))))
        return self.head(torch.tanh(self.layers[0](x)))


class Twice(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(F.relu(self.fc1(x)))))


class Between(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fc1(x)) + x)


class Returned(Parts):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc1(x)
        return self.head(F.relu(h)), h


class PairAndChain(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc3(x)) + x
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))


Names = list[tuple[tuple[str, ...], str, str]]
FORWARDS: dict[type[Parts], Names] = {
    Functions: [(("fc1", "fc2", "head"), "relu", "none")],
    Nested: [(("fc1", "head"), "gelu", "none")],
    Methods: [(("fc1", "fc2", "head"), "tanh", "sigmoid")],
    InPlace: [(("fc1", "head"), "relu", "none")],
    Loop: [(("layers.0", "layers.1", "layers.2"), "silu", "silu")],
    Counting: [(("layers.0", "layers.1", "layers.2"), "relu", "none")],
    TensorsLength: [],
    Asleep: [(("fc1", "fc2", "head"), "relu", "none")],
    TwoHeads: [],
    HeadsOfAChain: [(("fc1", "fc2"), "relu", "relu")],
    TwoKinds: [
        (("fc1", "fc2", "fc3", "layers.0"), "relu", "tanh"),
    ],
    Twice: [],
    Between: [],
    Returned: [],
    PairAndChain: [(("fc1", "fc2", "head"), "relu", "none")],
}


def matched(model: nn.Module, x: Any = X, mode: str = "inference", **more: Any) -> list[Any]:
    config = fl.Config(mode=mode)
    work = optimizing.prepare("test", model, x, config, None, lambda *_: None)
    candidates, _ = optimizing.watch(work, x, None)
    with optimizing.preserved(model, mode):
        return chains.match(work, candidates, ("mlp",))


def rewritten(model: nn.Module, found: list[Any]) -> SwapSet:
    """The model with these chains, and nothing else, swapped."""
    swaps = SwapSet(swaps_of([c for chain in found for c in chains.members(chain)]))
    swaps.on()
    return swaps


@pytest.mark.parametrize("kind", FORWARDS)
def test_what_counts_as_a_chain(kind: type[Parts]) -> None:
    found = matched(kind().eval())
    assert all(isinstance(c.forward, InForward) for c in found)
    named = ((c.names, c.problems[0].option) for c in found)
    assert [(n, of("activation"), of("final")) for n, of in named] == FORWARDS[kind]


@pytest.mark.parametrize("kind", [k for k, names in FORWARDS.items() if names])
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_the_rewritten_forward_computes_the_same(kind: type[Parts], mode: str) -> None:
    model = kind().train(mode == "train")
    other, before = copy.deepcopy(model), snapshot(model)
    found = matched(model, mode=mode)
    if kind is Asleep and mode == "train":
        assert found == []
        return
    calls: list[int] = []
    for chain in found:
        assert site.failure(chain) is None
        torch.testing.assert_close(chain.before(X), chain.after(X))
        torch.testing.assert_close(
            chain.layers(X, {c.fqn: c for c in chain.members}), chain.after(X)
        )
    swaps = rewritten(model, found)
    with Counted(calls):
        ours = model(X)
    assert len(calls) == len(found)
    theirs = other(X)
    for a, b in zip(as_tuple(ours), as_tuple(theirs), strict=True):
        torch.testing.assert_close(a, b)
    if mode == "train":
        for y in (ours, theirs):
            sum(t.square().sum() for t in as_tuple(y)).backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        model.zero_grad()
    swaps.revert()
    assert snapshot(model) == before


def as_tuple(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


class Counted(KnowingMode):
    """Notes every call of mlp."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is forwards.mlp:
            self.calls.append(len(args[1]))
        return func(*args, **(kwargs or {}))


def test_a_chain_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    (chain,) = matched(Functions().eval())
    assert site.failure(chain) is None
    real = forwards.call_mlp
    monkeypatch.setattr(forwards, "call_mlp", lambda x, w, b, *n: real(x, w, [None] * len(w), *n))
    assert site.failure(chain) is not None


CHANGES: dict[str, Any] = {
    "a hook on a linear": lambda m: m.fc2.register_forward_hook(lambda mod, args, y: y + 1),
    "a hook on the activation": lambda m: m.act.register_forward_hook(lambda mod, a, y: y + 1),
    "a hook on a sleeping dropout": lambda m: m.drop.register_forward_hook(lambda mod, a, y: y + 1),
    "another activation": lambda m: setattr(m, "act", nn.Tanh()),
    "another setting": lambda m: setattr(m.act, "approximate", "tanh"),
    "dropout awake": lambda m: m.train(),
    "one dropout awake": lambda m: m.drop.train(),
    "another layer": lambda m: setattr(m, "fc2", Doubled(6, 6)),
    "other weights": lambda m: nn.init.zeros_(m.fc2.weight),
    "a patched layer": lambda m: setattr(m.fc2, "forward", lambda x: x),
}


def test_a_longer_list_runs_as_it_now_is() -> None:
    model = Counting().eval()
    other = copy.deepcopy(model)
    rewritten(model, matched(model))
    for m in (model, other):
        torch.manual_seed(1)
        m.layers.append(nn.Linear(6, 6))
    torch.testing.assert_close(model(X), other(X))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Changing(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.fc2(self.drop(self.act(self.fc1(x))))))


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_parent_runs_as_it_now_is(change: str) -> None:
    model = Changing().eval()
    found = matched(model)
    assert [c.names for c in found] == [("fc1", "fc2", "head")]
    other = copy.deepcopy(model)
    rewritten(model, found)
    for m in (model, other):
        torch.manual_seed(1)
        CHANGES[change](m)
    torch.manual_seed(2)
    ours = model(X)
    torch.manual_seed(2)
    torch.testing.assert_close(ours, other(X))


class Tied(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.fc2.weight = self.fc1.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


def test_shared_weights_are_no_chain() -> None:
    assert matched(Tied().eval()) == []


def test_a_hook_before_the_rewrite_keeps_its_layer_out() -> None:
    model = Functions().eval()
    model.fc2.register_forward_hook(lambda *_: None)
    assert matched(model) == []


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_conv1d_is_a_transposed_linear(mode: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    config = transformers.GPT2Config(n_embd=16, resid_pdrop=0.0)
    torch.manual_seed(0)
    model, x = GPT2MLP(32, config).train(mode == "train"), torch.randn(2, 5, 16)
    other = copy.deepcopy(model)
    found = matched(model, x, mode)
    named = [(c.names, c.problems[0].option("activation")) for c in found]
    assert named == [(("c_fc", "c_proj"), "gelu_tanh")]
    assert site.failure(found[0]) is None
    rewritten(model, found)
    for m in (model, other):
        m(x).square().sum().backward()
    torch.testing.assert_close(model(x), other(x))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.fixture
def chains_win(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """oneDNN wins at the sites, the chain over everything, and both end to end; the names of the
    chain's rivals."""
    clock({"onednn": 50.0, "pieces": 30.0, "layerwise": 40.0, "whole_cpp": 40.0, "after": 50.0})
    arms: list[str] = []
    real = site.times

    def times(candidate: Any, runs: Any, device: Any, budget_s: float) -> Any:
        if not isinstance(candidate, Fusion):
            return real(candidate, runs, device, budget_s)
        arms.extend(runs)
        us = {name: (1.0 if name == "after" else 3.0,) * 5 for name in runs}
        return {n: Samples(n, t, "wall", 1, "clock") for n, t in us.items()}, 1

    monkeypatch.setattr(site, "times", times)
    return arms


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_optimize_save_apply_revert(mode: str, chains_win: list[str]) -> None:
    model = PairAndChain().train(mode == "train")
    before, expected = snapshot(model), copy.deepcopy(model)
    config = fl.Config(mode=mode, draws=2, optimizer_steps=2)
    result = fl.optimize_(model, X, config=config)
    routes = {s.fqn: s.route for s in result.sites if s.status == "kept"}
    assert routes == {"fc1": "chain", "fc2": "chain", "head": "chain", "fc3": "parent"}
    assert set(chains_win) == {"before", "after", "layers"}
    calls: list[int] = []
    with Counted(calls):
        torch.testing.assert_close(run(model, X), run(expected, X))
    assert calls == [3]
    plan = json.loads(json.dumps(result.plan.to_json()))
    result.revert()
    assert snapshot(model) == before
    again = fl.apply_(model, plan)
    assert {s.fqn: s.route for s in again.sites if s.status == "kept"} == routes
    assert again.plan.rewrites == result.plan.rewrites
    again.revert()
    assert snapshot(model) == before


def test_a_chain_slower_than_its_layers_is_left_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"onednn": 50.0, "layerwise": 40.0, "whole_cpp": 40.0, "after": 50.0, "layers": 10.0})
    result = fl.optimize_(Functions().eval(), X)
    assert {s.route for s in result.sites if s.status == "kept"} <= {"parent", "plain"}
    assert any("'fc1' to 'head' left alone" in n for n in result.notes), result.notes


def test_a_forced_backend_of_linear_act_does_not_reach_the_chains_plan(
    chains_win: list[str],
) -> None:
    model = Functions().eval()
    config = fl.Config(backends={"linear_act": "onednn"})
    result = fl.optimize_(model, X, config=config)
    plan = result.plan.to_json()
    assert {r["route"] for r in plan["rewrites"]} == {"chain"}
    result.revert()
    assert fl.apply_(model, plan).kept == 3


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def test_a_tiny_net_is_one_call_in_earnest() -> None:
    """Six layers at batch 1 cost PyTorch's overhead six times: measured, no help from a mock."""
    model, x = Deep().eval(), torch.randn(1, 48)
    expected = run(model, x)
    result = fl.optimize_(model, x)
    assert {s.route for s in result.sites} == {"chain"}, result.table()
    assert result.kept == 6
    assert result.speedup.low > 1.0
    torch.testing.assert_close(run(model, x), expected)
    print(result.table())
